"""KIVI's blocks: the same codes however a text is split, no row beside another, exact bytes."""

import pytest
import torch

from kvlab.cache import KVCache
from kvlab.cache.kivi import BlockFormat
from kvlab.errors import CacheError
from kvlab.layout import KVLayout
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=14)
KIVI2 = ServingConfig(kv_dtype="kivi2", kv_group=8, kv_residual=5)
COUNT = 45


def fixed_kv(rows=2, seed=0):
    """K and V (layers, B, H, T, D), as if a model had computed them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, rows, 2, COUNT, 8, generator=generator, dtype=torch.float64)


def fill(config, kv, chunks):
    """Store given K and V in passes of ``chunks`` tokens; return the cache."""
    layout = KVLayout.of(config, KIVI2)
    cache = KVCache(layout, kv.shape[2], COUNT, kv.dtype, torch.device("cpu"))
    start = 0
    for count in chunks:
        one_pass = cache.begin_pass(count)
        for layer in range(3):
            one_pass.write_kv(layer, *kv[:, layer, :, :, start : start + count])
            one_pass.read_kv(layer)
            one_pass.end_layer(layer)
        one_pass.finish()
        start += count
    return cache


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_any_chunks_give_the_same_codes_bitwise(config):
    kv = fixed_kv()
    by_token = fill(config, kv, [1] * COUNT)
    assert all(buffer.blocks[0][0].any() for buffer in by_token.buffers.values())
    for chunks in ([COUNT], [7, 1, 1, 30, 6], [13, 16, 16], [3, 42]):
        cache = fill(config, kv, chunks)
        for one, other in zip(by_token.tensors, cache.tensors, strict=True):
            assert torch.equal(one, other)


def test_tokens_are_exact_until_their_block_is_billed_as_codes():
    kv = fixed_kv(rows=1)
    layout = KVLayout.of(GLOBAL, KIVI2)
    full = 3 * 2 * 2 * 8 * 8  # layers, K and V, heads, head_dim, bytes of float64
    block = 3 * 2 * (8 * 8 // 4 + 8 * 4 + 8 * (8 // 4 + 4))
    for count in (1, 5, 12, 13, 20, 21, 45):
        cache = KVCache(layout, 1, count, kv.dtype, torch.device("cpu"))
        blocks = max(0, count - 5) // 8
        assert cache.nbytes == layout.stored_bytes(1, count, "float64")
        assert cache.nbytes == blocks * block + min(count, 13) * full
        one_pass = cache.begin_pass(count)
        one_pass.write_kv(0, *kv[:, 0, :, :, :count])
        keys, values = one_pass.read_kv(0).parts
        seen = one_pass.read_kv(0).mask[0, 0, -1]
        assert int(seen.sum()) == count
        exact = kv[:, 0, :, :, :count]
        for part, whole in zip((keys, values), exact, strict=True):
            changed = (part[:, :, seen] != whole).any(-1).any(1)[0]
            assert changed.tolist() == [place < 8 * blocks for place in range(count)]


@pytest.mark.parametrize(("per_byte", "levels"), [(4, 3), (2, 15)])
@pytest.mark.parametrize("group", [None, 8])
def test_codes_are_within_half_a_step_and_extremes_stay(per_byte, levels, group):
    torch.manual_seed(0)
    values = torch.randn(2, 3, 4, 16, 24, dtype=torch.float64) * 50
    values[0, 0, 0] = 0.0
    block_format = BlockFormat(per_byte, group)
    encoded = block_format.encode(values)
    allocated = block_format.allocate(values.shape, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in encoded] == [(t.shape, t.dtype) for t in allocated]
    decoded = block_format.decode(encoded, torch.float64)
    assert not decoded[0, 0, 0].any()
    dim, split = (-2, values) if group is None else (-1, values.unflatten(-1, (-1, 8)))
    spread = (split.amax(dim, True) - split.amin(dim, True)).expand_as(split).reshape(values.shape)
    error = (decoded - values).abs()
    assert (error <= 1.02 * spread / levels / 2 + 0.1).all()
    assert error.max() > 0.2 * spread.max() / levels


def test_a_crop_needs_all_tokens_of_a_block_that_the_window_cuts():
    """At 40 tokens token 32 has left the window of 8, and is quantized with its block at 42."""
    model = random_model(ModelConfig(**SHAPE, attention_pattern="L", window=8))
    serving = ServingConfig(kv_dtype="kivi2", kv_group=8, kv_residual=2)
    words = torch.randint(0, 29, (1, 46), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = model(words, cache=model.new_cache(1, 46, serving))
        cache = model.new_cache(1, 46, serving)
        model(words[:, :42], cache=cache)
        cache.crop(40)
        assert (model(words[:, 40:43], cache=cache) - whole[:, 40:43]).abs().max() < 1e-10
        with pytest.raises(CacheError, match="keeps the last 10 of 43 tokens in full precision"):
            cache.crop(40)


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_decoding_goes_on_from_a_crop_a_reset_and_copies_of_rows(config):
    model = random_model(config)
    words = torch.randint(0, 29, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = model(words, cache=model.new_cache(2, 40, KIVI2))
        cache = model.new_cache(2, 40, KIVI2)
        model(words[:, :33], cache=cache)
        cache.crop(29)  # 24 tokens are quantized, as they were at the 29th
        again = model(words[:, 29:], cache=cache)
        assert (again - whole[:, 29:]).abs().max() < 1e-10
        with pytest.raises(CacheError, match="keeps the last 13 of 40 tokens in full precision"):
            cache.crop(22)
        cache.reset()
        model(words[:, :30], cache=cache, lengths=[30, 21])
        copies = cache.select_rows(torch.tensor([1, 0, 1]))
        steps = model(words[[1, 0, 1]][:, 30:31], cache=copies)
        assert (steps[1] - whole[0, 30]).abs().max() < 1e-10
        text = torch.cat([words[1, :21], words[1, 30:31]])[None]
        assert (
            steps[0] - model(text, cache=model.new_cache(1, 40, KIVI2))[0, -1]
        ).abs().max() < 1e-10
        assert torch.equal(steps[0], steps[2])
