"""The roofline's arithmetic against counts by hand."""

import pytest

from kvlab.layout.roofline_model import (
    MAX_BREAK_EVEN,
    DevicePeaks,
    decode_step_cost,
    find_break_even,
)
from kvlab.spec import ModelConfig, ServingConfig

PLAIN = ServingConfig()
DEVICE = DevicePeaks("made", "float32", 0, bandwidth=1e12, flops=1e14)
SMALL = ModelConfig(vocab_size=100, block_size=64, n_layer=2, n_head=2, n_embd=8)


def test_flops_and_bytes_of_a_step_by_hand():
    cost = decode_step_cost(SMALL, PLAIN, 3, 10, "float32")
    weights = 2 * (8 * 24 + 8 * 8 + 2 * 8 * 32) + 100 * 8  # projections, MLPs, head
    assert cost.weight_bytes == 4 * (weights + 2 * 8), "and one row of each embedding"
    assert cost.kv_read_bytes == 3 * 2 * 10 * 2 * 8 * 4
    assert cost.kv_written_bytes == 3 * 2 * 2 * 8 * 4
    assert cost.flops == 3 * (2 * weights + 2 * 10 * 4 * 8)


def test_the_longer_of_moving_and_computing_bounds():
    xl = ModelConfig(preset="gpt2-xl")
    one, many = (decode_step_cost(xl, PLAIN, batch, 8, "float32") for batch in (1, 4096))
    assert one.bound(DEVICE) == "memory"
    assert one.seconds(DEVICE) == one.bytes / 1e12
    assert many.bound(DEVICE) == "compute"
    assert many.seconds(DEVICE) == many.flops / 1e14


def test_weights_are_read_at_the_bandwidth_of_products_and_all_of_it_is_used():
    slow = DevicePeaks("made", "float32", 0, 1e12, 1e14, product_bandwidth=5e11)
    cost = decode_step_cost(SMALL, PLAIN, 1, 10, "float32")
    assert cost.seconds(slow) == pytest.approx((cost.bytes + cost.weight_bytes) / 1e12)
    use = cost.mbu(cost.seconds(DEVICE), DEVICE)
    assert use == pytest.approx(1 - cost.kv_written_bytes / cost.bytes)
    assert cost.mfu(1.0, DEVICE) == cost.flops / 1e14


def test_the_break_even_context_is_the_first_that_pays():
    gpt2 = ModelConfig(preset="gpt2")
    shape, base = (gpt2, ServingConfig(kv_dtype="int8")), (gpt2, PLAIN)
    context = find_break_even(shape, base, DEVICE, batch_size=1)
    for length, pays in ((context - 1, False), (context, True)):
        costs = [decode_step_cost(*each, 1, length, "float32").bytes for each in (shape, base)]
        assert (costs[0] <= 0.9 * costs[1]) is pays


def test_sharing_saves_storage_and_no_reads_so_it_never_pays_in_time():
    gpt2 = ModelConfig(preset="gpt2")
    tied = (gpt2, ServingConfig(tie="adjacent:2"))
    assert find_break_even(tied, (gpt2, PLAIN), DEVICE, context_length=1024) is None
    assert MAX_BREAK_EVEN > 10**6
