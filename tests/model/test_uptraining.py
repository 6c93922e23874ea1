"""Starting from other weights: exact where it must be, pooled and averaged as published."""

import torch

from kvlab.model import GPT
from kvlab.model.uptraining import initialize_from
from kvlab.spec import ModelConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 23, "block_size": 16, "n_layer": 4, "n_head": 4, "n_embd": 32}
BASE = ModelConfig(**SHAPE)
TEXT = torch.arange(12)[None]


def initialized(config, model):
    target = GPT(config, seed=9, dtype=torch.float64)
    return target, initialize_from(target, BASE, dict(model.named_parameters()))


def test_the_same_shape_is_a_copy():
    model = random_model(BASE)
    copy, report = initialized(BASE, model)
    assert torch.equal(copy(TEXT), model(TEXT))
    assert not report.fresh
    assert not report.unused


def test_pooled_heads_are_means():
    model = random_model(BASE)
    small, report = initialized(ModelConfig(**SHAPE, n_kv_head=1), model)
    whole, part = model.blocks[2].attention.qkv, small.blocks[2].attention.qkv
    keys = whole.weight[32:64].view(4, 8, 32).mean(0)
    values = whole.weight[64:].view(4, 8, 32).mean(0)
    assert torch.allclose(part.weight[32:], torch.cat([keys, values]))
    assert torch.equal(part.weight[:32], whole.weight[:32])
    assert torch.allclose(part.bias[32:], whole.bias[32:].view(2, 4, 8).mean(1).flatten())
    assert len(report.pooled) == 8


def test_an_owner_averages_over_its_group():
    model = random_model(BASE)
    shared, report = initialized(ModelConfig(**SHAPE, kv_sharing="adjacent:2"), model)
    for owner in (0, 2):
        pair = [model.blocks[owner + i].attention.qkv.weight[32:] for i in (0, 1)]
        assert torch.allclose(shared.blocks[owner].attention.qkv.weight[32:], sum(pair) / 2)
    for layer in range(4):
        queries = model.blocks[layer].attention.qkv.weight[:32]
        assert torch.equal(shared.blocks[layer].attention.qkv.weight[:32], queries)
    assert set(report.averaged) == {f"blocks.{i}.attention.qkv.{p}" for i in (0, 2)
                                    for p in ("weight", "bias")}  # fmt: skip


def test_what_does_not_fit_is_listed_and_stays_fresh():
    model = random_model(BASE)
    other = ModelConfig(**{**SHAPE, "vocab_size": 30, "position": "rope"}, ffn_dim=64)
    target, report = initialized(other, model)
    assert torch.equal(target.token_embedding.weight[:23], model.token_embedding.weight)
    assert report.fresh["token_embedding.weight[23:]"] == "the source has 23 rows"
    assert report.fresh["blocks.0.mlp.up.weight"] == "the source's shape is (128, 32), not (64, 32)"
    fresh = GPT(other, seed=9, dtype=torch.float64)
    assert torch.equal(target.blocks[0].mlp.up.weight, fresh.blocks[0].mlp.up.weight)
    assert "position_embedding.weight" in report.unused


def convert(kv, source_kv, heads=2):
    """Return a model, the weights of a source with 4 heads, and what became of them."""
    shapes = [{} if isinstance(one, dict) else {"n_kv_head": n}
              for one, n in ((kv, heads), (source_kv, 4))]  # fmt: skip
    target, source = (
        ModelConfig(**SHAPE, position="rope", kv=one, **shape)
        for one, shape in zip((kv, source_kv), shapes, strict=True)
    )
    weights = dict(random_model(source).named_parameters())
    model = GPT(target, dtype=torch.float64)
    return model, weights, initialize_from(model, source, weights)
