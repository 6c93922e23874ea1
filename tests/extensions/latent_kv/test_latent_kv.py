"""Latent K/V: MLA and GLA."""

import pytest
import torch

from kvlab.layout import KVLayout, parameter_count
from kvlab.model import GPT, decode_attention
from kvlab.model.decode_attention import Keys
from kvlab.spec import ModelConfig
from kvlab.spec.dtypes import KVStorage
from tests.cache.test_formats import check_one_token
from tests.contracts.kv_form_contract import SHAPE, KVFormContract
from tests.contracts.slot_contract import check_one_pass
from tests.model.kernels.test_triton_kernels import check_step, kernels_on, needs_device  # noqa: F401
from tests.model.test_document_mask import check_documents
from tests.model.test_uptraining import convert
from tests.support.extensions import needs

LATENT = {"kv": {"latent": 24, "rotary": 4}}


class TestLatent(KVFormContract):
    changes, numbers = LATENT, 24 + 4


class TestGroupedLatent(KVFormContract):
    changes, numbers = {"kv": {"latent": 10, "rotary": 4, "groups": 2}}, 2 * 10 + 4


class TestLatentWithoutRotation(KVFormContract):
    changes, numbers = {"kv": {"latent": 24}, "position": "learned"}, 24


class TestSharedLatent(KVFormContract):
    changes, numbers = {"kv": {"latent": 24, "rotary": 4, "query": 12}, "kv_sharing": [0, 1, 1]}, 28


def test_a_step_attends_to_latents_themselves_and_training_expands_them():
    view = GPT(ModelConfig(**SHAPE, **LATENT)).blocks[0].attention.kv
    assert [view.is_absorbed(1, keys) for keys in (1, 2, 3, 9)] == [False, True, True, True]
    assert [view.is_absorbed(queries, 9) for queries in (2, 5, 6, 9)] == [True, True, False, False]


def test_flops_of_a_key_are_of_latent_and_rotary_key_and_of_the_sum_of_latents():
    layer = ModelConfig(**SHAPE, **LATENT).layers[0]
    assert layer.kv_form.flops_per_key(layer) == 2 * 4 * (24 + 4 + 24)


@pytest.mark.parametrize(("latent", "rotary", "fits"), [(256, 64, True), (272, 16, False)])
def test_the_widest_latents_that_attend_by_the_fused_kernel(latent, rotary, fits, monkeypatch):
    """The rotary key stands beside a latent, and does not count to its width."""
    monkeypatch.setattr(decode_attention, "are_kernels_usable", lambda _device: True)
    q, latents = torch.randn(1, 1, 4, rotary + latent), torch.randn(1, 1, 9, latent)
    keys = Keys(latents, shared=torch.randn(1, 1, 9, rotary))
    assert decode_attention.attends_by_triton(q, keys, latents) == fits


def test_latents_start_from_equal_ones_alone():
    assert not convert(LATENT["kv"], LATENT["kv"])[2].fresh
    report = convert({"latent": 12, "rotary": 4}, LATENT["kv"])[2]
    assert report.fresh["blocks.0.attention.kv.up.weight"] == "the source's latents differ"


@pytest.mark.parametrize(
    ("preset", "token_bytes"), [("deepseek-v2-lite", 31_104), ("deepseek-v3", 70_272)]
)
def test_presets_have_the_published_bytes_of_a_token(preset, token_bytes):
    assert KVLayout.of(ModelConfig(preset=preset)).bytes_per_token("bfloat16") == token_bytes


def test_active_parameters_of_deepseek_are_the_published_ones():
    v3, lite = ModelConfig(preset="deepseek-v3"), ModelConfig(preset="deepseek-v2-lite")
    assert round(parameter_count(v3) / 1e9) == 37
    embedding = lite.vocab_size * lite.n_embd
    assert round((parameter_count(lite) - embedding) / 1e9, 1) == 2.4


def test_one_token_reads_codes_and_only_the_entries_in_use(monkeypatch):
    check_one_token({"latent": 8, "rotary": 4}, {"kv_dtype": "int4", "kv_group": 4}, monkeypatch)


def test_one_pass_of_training_computes_what_is_served_token_by_token():
    check_one_pass({"kv": {"latent": 16, "rotary": 4}, "n_kv_head": 4}, KVStorage("int8"))


def test_each_document_and_its_gradients_are_computed_as_if_alone():
    latent = {"latent": 9, "rotary": 4}
    check_documents({"position": "rope", "kv": latent, "attention_pattern": "GL", "window": 5})


@needs_device
@pytest.mark.parametrize(
    "serving",
    [
        {"kv_dtype": "fp8", "kv_group": 4},
        pytest.param({"kv_dtype": "int4", "kv_rotate": "hadamard"}, marks=needs("rotation")),
    ],
)
def test_a_models_step_is_that_of_plain_code(serving, kernels_on, monkeypatch):  # noqa: ARG001, F811
    check_step(serving, {"latent": 16, "rotary": 4}, monkeypatch)
