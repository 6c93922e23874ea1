"""Training reads what serving stores: the codes of the cache, each as its query would see it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache import KVCache, begin_one_shot_pass
from kvlab.layout import KVLayout
from kvlab.model.attention import attend
from kvlab.model.decode_attention import Keys, decode_stored
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.dtypes import KVStorage
from tests.support.random_model import random_model
from tests.support.reference_model import ReferenceModel, round_to_format

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
MODELS = [
    {},
    {"attention_pattern": "GLL", "window": 14},
    {"attention_pattern": "LG", "window": 3},
    {"kv_sharing": "adjacent:2"},
    {"sink": "learned"},
]
STORAGES = [
    KVStorage("int8"),
    KVStorage("fp8"),
    KVStorage("int4", 4),
    KVStorage("bfloat16"),
    KVStorage("kivi2", 8, 5),
    KVStorage("kivi2", 4, 0),
    KVStorage("kivi4", 8, 20),
]


def serve(kv):
    return ServingConfig(kv_dtype=kv.dtype, kv_group=kv.group, kv_residual=kv.residual)


def draw(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@settings(max_examples=20, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    kv=st.sampled_from(STORAGES),
    length=st.integers(1, 40),
    rows=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_query_of_training_reads_bitwise_what_the_cache_decodes(
    model, kv, length, rows, dtype, seed
):
    config, device = ModelConfig(**SHAPE, **model), torch.device("cpu")
    parts = draw(seed, 2, 3, rows, 2, length, 8, dtype=dtype)
    trained = begin_one_shot_pass(config, kv, length, device)
    layout = KVLayout.of(config, serve(kv))
    cache = KVCache(layout, rows, length, dtype, device)
    contexts = []
    for layer in range(3):
        if trained.writes_kv(layer):
            trained.write_kv(layer, *parts[:, layer])
        contexts.append(trained.read_kv(layer))
        trained.end_layer(layer)
    for place in range(length):
        step = cache.begin_pass(1)
        for layer, context in enumerate(contexts):
            if step.writes_kv(layer):
                step.write_kv(layer, *parts[:, layer, :, :, place : place + 1])
            own = step.read_kv(layer)
            positions = step.key_positions(layer)
            served = tuple(decode_stored(part, dtype) for part in own.parts)
            if own.mask is not None:
                seen = own.mask[0, 0, 0]
                served = [part[:, :, seen] for part in served]
            else:  # a ring holds the window in another order
                served = [part[:, :, positions.argsort()] for part in served]
            if context.mask is None:
                window = config.layers[layer].window or length
                keys = slice(max(0, place - window + 1), place + 1)
            else:
                keys = context.mask[0, 0, place] == 0
            for ours, its in zip(context.parts, served, strict=True):
                assert torch.equal(ours[:, :, keys], its)
            step.end_layer(layer)
        step.finish()


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        *[(model, STORAGES[i]) for i, model in enumerate(MODELS)],
        ({"attention_pattern": "GLL", "window": 9, "sink_tokens": 2}, KVStorage("int4", 4)),
        ({"attention_pattern": "GLL", "window": 14}, KVStorage("kivi2", 4, 3)),
    ],
    ids=str,
)
def test_one_pass_of_training_computes_what_is_served_token_by_token(model, kv):
    check_one_pass(model, kv)


def check_one_pass(model, kv):
    model = random_model(ModelConfig(**{**SHAPE, **model}))
    words = torch.randint(1, 29, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = model(words)
        model.trained_kv = kv
        one_shot, cache = model(words), model.new_cache(2, 40, serve(kv))
        served = torch.cat([model(words[:, i : i + 1], cache=cache) for i in range(40)], 1)
        assert (one_shot - served).abs().max() < 1e-10
        assert (one_shot - exact).abs().max() > 1e-3, "rounding changes something"
        packed = words.clone()
        packed[0, 17] = packed[1, 0] = packed[1, 9] = 0
        together = model.compute_logits(model.hidden_states(packed, document_start=0))
        for row, start, end in [(0, 0, 17), (0, 17, 40), (1, 0, 9), (1, 9, 40)]:
            alone = model(packed[row : row + 1, start:end])[0]
            assert (together[row, start:end] - alone).abs().max() < 1e-10


def seen_by(kv, place, part, index):
    """Return a part (tokens, heads, size) as the query at ``place`` reads it, independently."""
    if kv.blocks is None:
        return round_to_format(part, kv.dtype, kv.group)
    reference = ReferenceModel(
        None, {}, [], kv_dtype=kv.dtype, kv_group=kv.group, kv_residual=kv.residual
    )
    return reference.see_blocks(place, (part, part), reference.round_blocks(part, part))[index]


@pytest.mark.parametrize("kv", [STORAGES[0], STORAGES[2], STORAGES[4], STORAGES[5]], ids=str)
@pytest.mark.parametrize("window", [None, 11])
def test_gradients_are_those_of_a_float64_model_of_the_scheme(kv, window):
    """In which rounding is a constant that is added, and each query has keys of its own."""
    count, shape = 21, {"attention_pattern": "L" if window else "G", "window": window}
    config = ModelConfig(**{**SHAPE, "n_layer": 1, **shape})
    inputs = [draw(seed, 1, heads, count, 8) for seed, heads in ((1, 4), (2, 2), (3, 2))]
    weights = draw(4, 1, 4, count, 8)

    ours = [part.clone().requires_grad_() for part in inputs]
    one_pass = begin_one_shot_pass(config, kv, count, torch.device("cpu"))
    one_pass.write_kv(0, *ours[1:])
    context = one_pass.read_kv(0)
    k, v = context.parts
    out = attend(ours[0], Keys(k), v, context=context, layer=config.layers[0], sink=None)
    (out * weights).sum().backward()

    exact = [part.double().requires_grad_() for part in inputs]
    total = 0.0
    for place in range(count):
        first = max(0, place - (window or count) + 1)
        read = []
        for index, part in enumerate(exact[1:]):
            plain = part.detach()[0].transpose(0, 1).numpy()
            rounded = torch.from_numpy(seen_by(kv, place, plain, index)).transpose(0, 1)[None]
            read.append((part + (rounded - part).detach())[:, :, first : place + 1])
        k, v = (part.repeat_interleave(2, 1) for part in read)
        scores = (exact[0][:, :, place : place + 1] @ k.mT / 8**0.5).softmax(-1)
        total = total + (scores @ v * weights[:, :, place : place + 1]).sum()
    total.backward()
    for one, other in zip(ours, exact, strict=True):
        assert other.grad.abs().max() > 0.1
        assert (one.grad - other.grad).abs().max() < 2e-6 * other.grad.abs().max() + 1e-6
