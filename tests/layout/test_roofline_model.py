"""The roofline's arithmetic against counts by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvlab.layout import KVLayout
from kvlab.layout.roofline_model import (
    MAX_BREAK_EVEN,
    DevicePeaks,
    decode_flops,
    decode_step_cost,
    find_break_even,
)
from kvlab.model import GPT
from kvlab.model.kernels.cpu_kernel import use_plain_code
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


def test_the_break_even_context_is_the_first_that_pays_and_sharing_never_does():
    gpt2 = ModelConfig(preset="gpt2")
    shape, base = (gpt2, ServingConfig(kv_dtype="int8")), (gpt2, PLAIN)
    found = find_break_even(shape, base, DEVICE, batch_size=1)
    context, last = found[0], found[-1]
    assert last >= MAX_BREAK_EVEN
    for length, pays in ((context - 1, False), (context, True)):
        costs = [decode_step_cost(*each, 1, length, "float32").bytes for each in (shape, base)]
        assert (costs[0] <= 0.9 * costs[1]) is pays
    tied = (gpt2, ServingConfig(tie="adjacent:2"))
    assert find_break_even(tied, base, DEVICE, context_length=1024) is None


def test_a_prompt_that_is_reduced_pays_in_contexts_that_are_not_much_longer():
    config = ModelConfig(vocab_size=128, n_layer=4, n_head=4, n_embd=64, block_size=1024)
    evict = {"keep": 64, "by": "snapkv", "prompt": 256}
    shape, base = (config, ServingConfig(evict=evict)), (config, PLAIN)
    for batch in (1, 64):
        found = find_break_even(shape, base, DEVICE, batch_size=batch)
        assert found[0] == 257 or batch > 1
        for length in (found[0] - 1, found[0], found[-1], found[-1] + 1):
            costs = [decode_step_cost(*e, batch, length, "float32").bytes for e in (shape, base)]
            assert (costs[0] <= 0.9 * costs[1]) is (length in found)


def test_ties_by_the_owner_save_the_products_that_torch_counts():
    config = ModelConfig(n_layer=4, n_head=4, n_embd=32, block_size=64, vocab_size=128, bias=False)
    model, token = GPT(config).eval(), torch.zeros(1, 1, dtype=torch.int64)
    counted, computed, read = [], [], []
    for serving in (PLAIN, ServingConfig(tie="adjacent:2", tie_rule="owner")):
        cache = model.new_cache(1, 64, serving)
        with torch.no_grad(), use_plain_code(), FlopCounterMode(display=False) as counter:
            model.run_pass(token, cache.begin_pass(1))
        counted.append(counter.get_total_flops())
        computed.append(decode_flops(config, 1, KVLayout.of(config, serving)))
        read.append(decode_step_cost(config, serving, 1, 64, "float32").weight_bytes)
    unwritten = 2 * 32 * 2 * 32  # weights of K and V of two layers
    assert computed[0] - computed[1] == counted[0] - counted[1] == 2 * unwritten
    assert read[0] - read[1] == 4 * unwritten
