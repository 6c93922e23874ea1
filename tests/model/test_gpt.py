"""What the fuzzer does not reach: one-shot scoring, gradients, initialisation, refusals."""

import pytest
import torch
import torch.nn.functional as F

from kvlab.errors import CacheError
from kvlab.layout import KVLayout
from kvlab.model import GPT, attention
from kvlab.spec import ModelConfig
from kvlab.spec.layer_config import POSITIONS
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 24}


@pytest.mark.parametrize("name", POSITIONS)
class TestPositionSchemes:
    """The fuzzer draws every scheme, and compares caches and parameters (`test_fuzz_model.py`)."""

    without_order = ("none",)
    """Schemes by which one layer does not tell the order of earlier tokens."""

    @torch.no_grad()
    def test_the_order_of_earlier_tokens_matters_if_there_are_positions(self, name):
        model = random_model(ModelConfig(**SHAPE, n_layer=1, position=name))
        tokens = torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(0))
        swapped = tokens[:, [1, 0, *range(2, 24)]]
        difference = (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max().item()
        assert (difference > 1e-6) == (name not in self.without_order)


SMALL = {"vocab_size": 29, "block_size": 32, "n_layer": 6, "n_head": 4, "n_embd": 32}
HYBRID = {**SMALL, "n_kv_head": 2, "attention_pattern": "GLLLLL", "window": 5, "position": "rope"}


def tokens(rows, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 29, (rows, count), generator=generator)


def test_local_and_global_layers_store_heads_of_their_own():
    """Five local layers of one head and a window of 5, one global layer of four wider heads."""
    own = {"local": {"n_kv_head": 1}, "global": {"n_kv_head": 4, "head_dim": 16}}
    config = ModelConfig(**{**HYBRID, **own})
    slots = config.layer_kinds.count("L"), config.layer_kinds.count("G")
    layout, head_dim = KVLayout.of(config), HYBRID["n_embd"] // HYBRID["n_head"]
    expected = 2 * 4 * (slots[0] * 5 * head_dim + slots[1] * 30 * 4 * 16)
    assert layout.stored_bytes(1, 30, "float32") == GPT(config).new_cache(1, 30).nbytes == expected
    assert layout.bytes_per_token_at_limit() == 2 * 4 * slots[1] * 4 * 16


def test_consumers_have_no_kv_parameters_and_owners_get_the_gradient_of_all_readers():
    config = ModelConfig(**SMALL, kv_sharing=[[0, 1, 2], [3, 4, 5]])
    model, text = random_model(config), tokens(2, 20)
    assert [b.attention.store_width > 0 for b in model.blocks] == [True, False, False] * 2
    weight, losses = model.blocks[0].attention.qkv.weight, []
    model(text).square().mean().backward()
    with torch.no_grad():
        step = torch.zeros_like(weight)
        step[model.blocks[0].attention.q_rows :].normal_(0.0, 1e-6)
        for sign in (1, -2):
            weight += sign * step
            losses.append(model(text).square().mean())
    change = float(2 * (weight.grad * step).sum())
    assert float(losses[0] - losses[1]) == pytest.approx(change, rel=1e-5)


def test_under_autocast_q_k_and_v_have_the_dtype_of_products(monkeypatch):
    """Also where norms give float32, as they do on CUDA."""
    rms_norm, attend, dtypes = F.rms_norm, attention.attend, set()

    def watch(q, k, v, **options):
        dtypes.update((q.dtype, k.stored.dtype, v.dtype))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "rms_norm", lambda *args: rms_norm(*args).float())
    monkeypatch.setattr(attention, "attend", watch)
    with torch.autocast("cpu", torch.bfloat16):
        GPT(ModelConfig(**SMALL, qk_norm=True, position="rope"))(tokens(2, 9))
    assert dtypes == {torch.bfloat16}


def test_cells_of_one_seed_start_equal_where_shapes_allow():
    base = GPT(ModelConfig(**SMALL), seed=7)
    mqa = GPT(ModelConfig(**SMALL, n_kv_head=1, position="rope"), seed=7)
    other = GPT(ModelConfig(**SMALL), seed=8)
    width = base.blocks[0].attention.q_rows
    for left, right in zip(base.blocks, mqa.blocks, strict=True):
        assert torch.equal(left.mlp.up.weight, right.mlp.up.weight)
        assert torch.equal(left.attention.qkv.weight[:width], right.attention.qkv.weight[:width])
    assert not torch.equal(base.token_embedding.weight, other.token_embedding.weight)
    assert base.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    scaled = 0.02 / (2 * 6) ** 0.5
    assert base.blocks[0].mlp.down.weight.std().item() == pytest.approx(scaled, rel=0.1)


def test_rope_runs_past_the_trained_length():
    config = ModelConfig(**HYBRID)
    model, text = random_model(config), tokens(1, 80)
    cache = model.new_cache(1, 80)
    steps = torch.cat([model(text[:, i : i + 1], cache=cache) for i in range(80)], 1)
    assert (steps - model(text)).abs().max() < 1e-10


def test_more_tokens_than_there_are_positions_or_a_cache_holds_are_refused():
    model = GPT(ModelConfig(**SMALL))
    cache = model.new_cache(1, 8)
    model(tokens(1, 6), cache=cache)
    with pytest.raises(CacheError, match="9 tokens do not fit a cache of max_length = 8"):
        model(tokens(1, 3), cache=cache)
    with pytest.raises(CacheError, match="lengths"):
        model(tokens(1, 2), cache=cache, lengths=[3])
    with pytest.raises(ValueError, match="needs a cache"):
        model(tokens(2, 4), lengths=[2, 4])
    with pytest.raises(ValueError, match="33 tokens exceed block_size = 32"):
        model(tokens(1, 33))
    cache = model.new_cache(1, 64)
    model(tokens(1, 32), cache=cache)
    with pytest.raises(ValueError, match="block_size"):
        model(tokens(1, 1), cache=cache)
