"""K and V that are stored rotated: logits, codes of a plain reference, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.extensions.rotation.hadamard import find_size_problem, make_matrix
from kvlab.layout import KVLayout
from kvlab.model.generate import EagerDecoder, StaticDecoder
from kvlab.own_extensions import load_parts
from kvlab.spec import ModelConfig, ServingConfig
from tests.cache.test_two_dtypes import PAIRS, check_stored_codes
from tests.model.kernels.test_triton_kernels import check_step, kernels_on, needs_device  # noqa: F401
from tests.support.prefixes import copy_prefix
from tests.support.random_model import random_model
from tests.support.reference_model import hadamard

SHAPE = {"vocab_size": 41, "n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 64}
FORMS = [{"n_kv_head": 2}, {"n_kv_head": 1, "head_dim": 12}]
if "tied_kv" in load_parts():
    FORMS += [{"kv": kv, "n_kv_head": 2} for kv in ("tied", "rotated_tied", "grouped_tied")]
if "latent_kv" in load_parts():
    FORMS += [{"kv": {"latent": 20, "rotary": 4}}, {"kv": {"latent": 8, "rotary": 8, "groups": 2}}]
LAYERS = [
    {},
    {"attention_pattern": "GLL", "window": 7},
    {"attention_pattern": "LG", "window": 5, "sink_tokens": 2, "sink": "learned"},
    {"kv_sharing": "adjacent:2"},
]
SERVINGS = [
    {},
    {"kv_dtype": "int8"},
    {"kv_dtype": "int4", "kv_group": 4},
    {"tie": "adjacent:2", "tie_rule": "owner"},
]
OF_EXTENSIONS = {
    "eviction": [
        {"evict": {"keep": 9, "sinks": 2}},
        {"evict": {"keep": 9, "by": "heavy_hitters"}, "kv_dtype": "fp8"},
    ],
    "kivi": [{"kv_dtype": "kivi2", "kv_group": 4, "kv_residual": 3}],
}
SERVINGS += [one for name in load_parts() for one in OF_EXTENSIONS.get(name, ())]


@pytest.mark.parametrize("size", [4, 8, 12, 64, 80, 256])
def test_the_matrix_is_orthonormal_symmetric_and_of_signs(size):
    matrix = make_matrix(size, torch.device("cpu"))
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-14)
    assert torch.equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix, hadamard(size), rtol=0, atol=1e-15)
    assert find_size_problem(size, "head") is None


@settings(max_examples=24)
@given(
    form=st.sampled_from(FORMS),
    layers=st.sampled_from(LAYERS),
    position=st.sampled_from(["rope", "none", "learned"]),
    cuts=st.lists(st.integers(1, 23), unique=True, max_size=4).map(sorted),
    seed=st.integers(0, 999),
)
def test_rotated_logits_are_the_plain_ones(form, layers, position, cuts, seed):
    """In chunks, then token by token, by plain and by static steps."""
    is_rotary = position == "rope"
    if not is_rotary and (
        form.get("kv") in ("grouped_tied", "rotated_tied") or isinstance(form.get("kv"), dict)
    ):
        form = {"n_kv_head": 4}
    config = ModelConfig(**SHAPE, **form, **layers, position=position)
    model = random_model(config, seed=seed, std=0.3).eval()
    tokens = torch.randint(0, 41, (2, 32), generator=torch.Generator().manual_seed(seed))
    chunks = tokens[:, :24].tensor_split(cuts, 1)
    with torch.inference_mode():
        expected = model(tokens)
        for decoder in (EagerDecoder, StaticDecoder):
            cache = model.new_cache(2, 32, ServingConfig(kv_rotate="hadamard"))
            found = [model(chunk, cache=cache) for chunk in chunks]
            decode = decoder(model, cache)
            found += [decode(tokens[:, i])[:, None].clone() for i in range(24, 32)]
            assert (torch.cat(found, 1) - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("form", "serving"),
    [(FORMS[0], how) for how in SERVINGS]
    + [(one, how) for one in FORMS[2:3] for how in SERVINGS[:4]],
    ids=str,
)
def test_what_is_stored_takes_the_same_bytes_and_no_split_changes_it(form, serving):
    config = ModelConfig(**SHAPE, **form, position="rope")
    serving = {"kv_rotate": "hadamard", **serving}
    how, model = ServingConfig(**serving), random_model(config, std=0.3)
    plain = ServingConfig(**{**serving, "kv_rotate": "none"})
    rotated, unrotated = (KVLayout.of(config, one) for one in (how, plain))
    assert rotated.formula(2, 30) == unrotated.formula(2, 30)
    tokens = torch.randint(0, 41, (2, 24), generator=torch.Generator().manual_seed(1))
    caches = [model.new_cache(2, 24, how) for _ in range(2)]
    assert caches[0].nbytes == unrotated.stored_bytes(2, 24, "float64")
    with torch.inference_mode():
        steps = torch.cat([model(tokens[:, i : i + 1], cache=caches[0]) for i in range(24)], 1)
        whole = torch.cat([model(part, cache=caches[1]) for part in tokens.split([9, 1, 14], 1)], 1)
    assert (steps - whole).abs().max() < 1e-9
    for one, other in zip(caches[0].tensors, caches[1].tensors, strict=True):
        if one.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_rotation_lowers_the_error_of_an_outlier_channel():
    """One channel of keys is 30 times as large as the others, and queries hardly read it."""
    config = ModelConfig(**{**SHAPE, "n_embd": 128}, position="rope", rotary_share=0.5)
    model = random_model(config, std=0.05).eval()
    with torch.no_grad():
        for block in model.blocks:
            q, k, _ = block.attention.qkv.weight.view(3, 4, 32, 128)
            k[:, -1] *= 30
            q[:, -1] /= 30
    tokens = torch.randint(0, 41, (4, 48), generator=torch.Generator().manual_seed(3))
    errors = {}
    with torch.inference_mode():
        expected = model(tokens)
        for rotate in ("none", "hadamard"):
            how = ServingConfig(kv_dtype="int4", kv_rotate=rotate)
            logits = model(tokens, cache=model.new_cache(4, 48, how))
            errors[rotate] = float((logits - expected).square().mean().sqrt())
    assert 0 < errors["hadamard"] < 0.7 * errors["none"]


@pytest.mark.parametrize(("k", "v"), PAIRS)
@torch.inference_mode()
def test_k_and_v_are_rotated_in_dtypes_of_their_own(k, v):
    check_stored_codes(k, v, kv_rotate="hadamard")


@needs_device
def test_a_models_step_is_that_of_plain_code(kernels_on, monkeypatch):  # noqa: ARG001, F811
    check_step({"kv_dtype": "int8", "kv_rotate": "hadamard"}, "separate", monkeypatch)


@torch.inference_mode()
def test_a_prefix_that_is_taken_over_has_the_same_rotated_codes():
    config = ModelConfig(**SHAPE, attention_pattern="GLL", window=6, position="rope")
    model, how = random_model(config), ServingConfig(kv_dtype="int8", kv_rotate="hadamard")
    caches, text = [model.new_cache(1, 64, how) for _ in range(3)], torch.arange(35)[None]
    model(text[:, :30], cache=caches[0])
    copy_prefix(caches[0], caches[1])
    rest = model(text[:, 30:], cache=caches[1])
    assert (rest - model(text, cache=caches[2])[:, 30:]).abs().max() < 1e-10
