"""KIVI's blocks: the same codes however a text is split, no row beside another, exact bytes."""

import pytest
import torch

from kvlab.cache import KVCache
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
