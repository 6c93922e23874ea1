"""Blocks of codes beside exact tokens: to the byte, in training as served, and as each row alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.benchmark.measures.decode_memory import count_kv_bytes
from kvlab.cache import KVCache
from kvlab.extensions.kivi.config import BlockRule
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.model.generate import EagerDecoder
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.dtypes import KVStorage
from tests.cache.test_formats import check_divisors
from tests.cache.test_two_dtypes import check_steps, check_stored_codes
from tests.contracts import slot_contract
from tests.evaluate.test_scoring import check_trained_storage
from tests.support.extensions import needs
from tests.support.reference_model import ReferenceModel

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
KIVI2 = ServingConfig(kv_dtype="kivi2", kv_group=8, kv_residual=5)
STORAGES = [KVStorage("kivi2", 8, 5), KVStorage("kivi2", 4, 0), KVStorage("kivi4", 8, 20)]


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_copies_of_rows_of_other_lengths_go_on_as_each_alone(config):
    slot_contract.check_copies_of_rows(config, KIVI2)


def test_tokens_are_exact_until_their_block_is_billed_as_codes():
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 3, 1, 2, 45, 8, generator=draw, dtype=torch.float64)  # as of a model
    layout = KVLayout.of(GLOBAL, KIVI2)
    full = 3 * 2 * 2 * 8 * 8  # layers, K and V, heads, head_dim, bytes of float64
    block = 3 * 2 * (8 * 8 // 4 + 8 * 4 + 8 * (8 // 4 + 4))
    for count in (1, 5, 12, 13, 20, 21, 45):
        cache = KVCache(layout, 1, count, kv.dtype, torch.device("cpu"))
        blocks = max(0, count - 5) // 8
        assert cache.nbytes == layout.stored_bytes(1, count, "float64")
        assert cache.nbytes == blocks * block + min(count, 12) * full
        one_pass = cache.begin_pass(count)
        one_pass.write_kv(0, *kv[:, 0, :, :, :count])
        keys, values = one_pass.read_kv(0).parts
        seen = one_pass.read_kv(0).mask[0, 0, -1]
        assert int(seen.sum()) == count
        exact = kv[:, 0, :, :, :count]
        for part, whole in zip((keys, values), exact, strict=True):
            changed = (part[:, :, seen] != whole).any(-1).any(1)[0]
            assert changed.tolist() == [place < 8 * blocks for place in range(count)]


@settings(max_examples=30)
@given(
    group=st.sampled_from([4, 8]),
    residual=st.integers(0, 6),
    window=st.sampled_from([None, 4, 9]),
    count=st.integers(1, 40),
)
def test_every_entry_that_is_reserved_is_filled(group, residual, window, count):
    pattern = "GL" if window else "G"
    model = ModelConfig(**{**SHAPE, "n_layer": 2}, attention_pattern=pattern, window=window)
    layout = KVLayout.of(
        model, ServingConfig(kv_dtype="kivi2", kv_group=group, kv_residual=residual)
    )
    cache = KVCache(layout, 1, count, torch.float32, torch.device("cpu"))
    assert cache.nbytes == layout.stored_bytes(1, count)
    for _ in range(count):
        one_pass = cache.begin_pass(1)
        for layer in range(2):
            one_pass.write_kv(layer, *torch.ones(2, 1, 2, 1, 8))
            one_pass.end_layer(layer)
        one_pass.finish()
    for buffer in cache.buffers.values():
        assert all(bool(part.all()) for part in buffer.full)
        assert all(bool(low.all()) for _, _, low in buffer.blocks)


def test_kv_bytes_are_those_counted_by_hand():
    model = GPT(ModelConfig(vocab_size=64, block_size=32, n_layer=6, n_head=4, n_embd=32,
                            attention_pattern="GLLLLL", window=10))  # fmt: skip
    serving = ServingConfig(kv_dtype="kivi2", kv_group=8, kv_residual=4)
    # a block is 4 heads x (64 / 4 + 8 x 4) of K and 8 tokens x 4 heads x (8 / 4 + 4) of V
    stored = 3 * 384 + 11 * 256 + 5 * (1 * 384 + 11 * 256)
    read = 3 * 384 + 8 * 256 + 5 * (1 * 384 + 8 * 256)  # the last 8 tokens are in no block yet
    counted = count_kv_bytes(model, serving, 1, 32)
    assert counted == {"kv_formula": stored, "kv_storage": stored, "kv_read": read}


@given(
    group=st.sampled_from([1, 4, 8]),
    residual=st.integers(0, 12),
    window=st.none() | st.integers(1, 24),
    tokens=st.integers(1, 40),
)
def test_what_a_step_reads_is_counted_token_by_token(group, residual, window, tokens):
    rule = BlockRule(group, residual)
    quantizes = window is None or window > residual

    def is_quantized(token, held):  # by the scheme: with its block, once enough newer ones follow
        return quantizes and (token // group + 1) * group <= held - residual

    blocks, full = set(), 0
    for token in range(tokens):
        is_seen = window is None or token >= tokens - window
        if is_quantized(token, tokens - 1):
            blocks |= {token // group} if is_seen else set()
        else:
            full += is_seen or is_quantized(token, tokens)
    assert rule.count_read(tokens, window) == (len(blocks), full)


@pytest.mark.parametrize(
    "rotate", [{}, pytest.param({"kv_rotate": "hadamard"}, marks=needs("rotation"))]
)
@torch.inference_mode()
def test_k_and_v_may_have_codes_of_other_sizes(rotate):
    blocks = {"kv_group": 4, "kv_residual": 3}
    check_stored_codes("kivi4", "kivi2", **blocks, **rotate)
    how = ServingConfig(kv_dtype={"k": "kivi4", "v": "kivi2"}, **blocks, **rotate)
    check_steps(how, (EagerDecoder,))


def test_a_device_divides_by_tensors_alone():
    check_divisors(kv_dtype="kivi2", kv_group=4, kv_residual=1)


def test_a_model_that_was_trained_so_is_scored_one_shot_as_it_is_served():
    check_trained_storage(KVStorage("kivi2", 4, 2))


@settings(max_examples=20)
@given(
    model=st.sampled_from(slot_contract.MODELS),
    kv=st.sampled_from(STORAGES),
    length=st.integers(1, 40),
    rows=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_query_of_training_reads_bitwise_what_the_cache_decodes(
    model, kv, length, rows, dtype, seed
):
    slot_contract.check_reads(model, kv, length, rows, dtype, seed)


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        ({"sink": "learned"}, STORAGES[0]),
        ({"kv_sharing": "adjacent:2"}, STORAGES[1]),
        ({"attention_pattern": "GLL", "window": 14}, KVStorage("kivi2", 4, 3)),
    ],
    ids=str,
)
def test_one_pass_of_training_computes_what_is_served_token_by_token(model, kv):
    slot_contract.check_one_pass(model, kv)


@pytest.mark.parametrize("kv", STORAGES[:2], ids=str)
@pytest.mark.parametrize("window", [None, 11])
def test_gradients_are_those_of_a_float64_model_of_the_scheme(kv, window):
    reference = ReferenceModel(
        None, {}, [], kv_dtype=kv.dtype, kv_group=kv.group, kv_residual=kv.residual
    )

    def seen_by(_kv, place, part, index):
        rounded = reference.round_blocks(part, part)
        return reference.see_blocks(place, (part, part), rounded)[index]

    slot_contract.check_gradients(kv, window, seen_by)
