"""`serving.kv_dtype: {k: ..., v: ...}`: K and V in dtypes of their own."""

import pytest
import torch

from kvlab.layout import KVLayout
from kvlab.model import GPT, decode_attention
from kvlab.model.generate import EagerDecoder, StaticDecoder, prefill
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 41, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64,
         "block_size": 64, "position": "rope", "attention_pattern": "GL", "window": 9}  # fmt: skip
PAIRS = [("int8", "int4"), ("int4", "int8"), ("model", "int4"), ("fp8", "bfloat16")]


def serve(k, v, **more):
    return ServingConfig(kv_dtype={"k": k, "v": v}, **more)


@pytest.mark.parametrize(("k", "v"), PAIRS)
@torch.inference_mode()
def test_k_and_v_are_stored_as_each_would_be_with_its_own_dtype_for_both(k, v):
    check_stored_codes(k, v)


def check_stored_codes(k, v, **more):
    """Compare what is stored of K and of V with caches of one dtype."""
    config = ModelConfig(**SHAPE)
    tokens = torch.randint(0, 41, (2, 30), generator=torch.Generator().manual_seed(0))
    model = random_model(config)
    caches = {}
    for own in ((k, v), (k, k), (v, v)):
        how = serve(*own, **more)
        caches[own] = model.new_cache(2, 30, how)
        layout = KVLayout.of(config, how)
        assert caches[own].nbytes == layout.stored_bytes(2, 30, "float64")
        model(tokens, cache=caches[own])
    buffers = {own: cache.buffers[0] for own, cache in caches.items()}  # of the first layer
    kept = [getattr(buffer, "blocks", None) or buffer.parts for buffer in buffers.values()]
    mixed, of_k, of_v = kept
    for one, other in ((mixed[0], of_k[0]), (mixed[1], of_v[1])):
        for stored, expected in zip(one, other, strict=True):
            assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("k", "v"), PAIRS)
@torch.inference_mode()
def test_steps_of_any_kind_read_what_chunks_do(k, v):
    check_steps(serve(k, v), (EagerDecoder, StaticDecoder))


def check_steps(how, decoders):
    """Steps of any kind read what chunks do."""
    model = random_model(ModelConfig(**SHAPE))
    tokens = torch.randint(0, 41, (2, 24), generator=torch.Generator().manual_seed(1))
    whole = model(tokens, cache=model.new_cache(2, 24, how))[:, 16:]
    for decoder in decoders:
        cache = model.new_cache(2, 24, how)
        prefill(model, tokens[:, :16], cache)
        decode = decoder(model, cache)
        steps = torch.stack([decode(token).clone() for token in tokens[:, 16:].T], 1)
        assert (steps - whole).abs().max() < 1e-4  # products of codes are in float32


def test_one_spelling_of_equal_dtypes_is_the_string():
    assert serve("int8", "int8") == ServingConfig(kv_dtype="int8")
    how = serve("int8", "int4")
    assert ServingConfig.model_validate(how.model_dump()) == how
    assert KVLayout.of(ModelConfig(**SHAPE), how).storage_dtype("float32") == "K int8, V int4"


def test_a_kernel_takes_codes_that_it_converts_alike_and_no_others(monkeypatch):
    monkeypatch.setattr(decode_attention, "are_kernels_usable", lambda _device: True)
    q = torch.zeros(1, 2, 1, 16)
    taken = set()
    for k in ("int8", "int4", "fp8", "float32"):
        for v in ("int8", "int4", "fp8", "float32"):
            model = GPT(ModelConfig(**SHAPE))
            buffer = model.new_cache(1, 8, serve(k, v)).buffers[0]
            keys, values = buffer.read_step(slice(0, 4))
            if decode_attention.attends_by_triton(q, decode_attention.Keys(keys), values):
                taken.add((k, v))
    same = {(name, name) for name in ("int8", "int4", "fp8", "float32")}
    assert taken == same | {("int8", "int4"), ("int4", "int8")}
