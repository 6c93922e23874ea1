"""One tensor for K and V: tied, rotated and grouped-tied attention."""

import pytest
import torch

from kvlab.cache import begin_one_shot_pass
from kvlab.model import GPT, decode_attention
from kvlab.spec import ModelConfig
from kvlab.spec.dtypes import KVStorage
from tests.cache.test_formats import check_one_token
from tests.contracts.kv_form_contract import SHAPE, KVFormContract
from tests.contracts.slot_contract import check_one_pass
from tests.model.kernels.test_triton_kernels import check_step, kernels_on, needs_device  # noqa: F401
from tests.model.test_document_mask import check_documents
from tests.model.test_uptraining import convert
from tests.support.random_model import random_model

TIED, ROTATED, GROUPED = (
    {"kv": name, "n_kv_head": 2} for name in ("tied", "rotated_tied", "grouped_tied")
)


def config(changes, **more):
    return ModelConfig(**{**SHAPE, **changes, **more})


class TestTied(KVFormContract):
    changes, numbers = TIED, 2 * 8


class TestTiedWithoutRotation(KVFormContract):
    changes, numbers = {"kv": "tied", "position": "none"}, 4 * 8


class TestRotatedTied(KVFormContract):
    changes, numbers = ROTATED, 2 * 8


class TestGroupedTied(KVFormContract):
    changes, numbers = GROUPED, 2 * 8 + 4


def test_queries_start_equal_and_one_tensor_for_k_and_v_starts_as_v():
    separate, tied = (GPT(config(form), seed=4) for form in ({"n_kv_head": 2}, TIED))
    ours, theirs = (m.blocks[1].attention.qkv.weight for m in (tied, separate))
    assert torch.equal(ours[:32], theirs[:32])
    assert torch.equal(ours[32:], theirs[48:])


@pytest.mark.parametrize(
    ("form", "rotated"),  # three FLOPs for each number of a key that is rotated as it is read
    [(TIED, 3 * 2 * 8), (ROTATED, 0)],
)
def test_flops_of_a_key(form, rotated):
    layer = config(form).layers[0]
    assert layer.kv_form.flops_per_key(layer) == 2 * 4 * (8 + 8) + rotated


def test_values_turn_with_their_distance_and_no_key_is_rotated_as_it_is_read(monkeypatch):
    """Logits do not change if all positions are larger, but they do if distances are."""
    monkeypatch.setattr(decode_attention, "_score_rotated", None)
    model = random_model(config(ROTATED, attention_pattern="G", window=None))
    tokens = torch.arange(6)[None]
    with torch.inference_mode():
        cache = model.new_cache(1, 6)
        steps = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(6)], 1)
        logits = []
        for positions in (torch.arange(6), torch.arange(6) + 30, torch.arange(6) * 2):
            one_pass = begin_one_shot_pass(model.config, KVStorage(), 6, tokens.device)
            one_pass.positions, one_pass.position_limit = positions, 64
            logits.append(model.compute_logits(model.run_pass(tokens, one_pass)))
    assert (steps - logits[0]).abs().max() < 1e-10
    assert (logits[1] - logits[0]).abs().max() < 1e-10
    assert (logits[2] - logits[0]).abs().max() > 1e-2


def test_one_tensor_starts_from_one_tensor_alone():
    name = "blocks.1.attention.qkv.weight"
    model, weights, report = convert("tied", "separate")
    assert report.fresh[f"{name}[32:]"] == "the source stores its K/V as separate, not tied"
    assert torch.equal(model.state_dict()[name][:32], weights[name][:32])
    assert name in convert("tied", "tied")[2].pooled


@pytest.mark.parametrize(
    ("kv", "serving"),
    [("tied", {"kv_dtype": "fp8"}), ("grouped_tied", {"kv_dtype": "int8", "kv_group": 4})],
)
def test_one_token_reads_codes_and_only_the_entries_in_use(kv, serving, monkeypatch):
    check_one_token(kv, serving, monkeypatch)


@pytest.mark.parametrize(
    ("kv", "storage"), [("tied", KVStorage("int4", 4)), ("grouped_tied", KVStorage("fp8"))]
)
def test_one_pass_of_training_computes_what_is_served_token_by_token(kv, storage):
    check_one_pass({"kv": kv}, storage)


def test_each_document_and_its_gradients_are_computed_as_if_alone():
    check_documents({"position": "rope", "kv": "tied"})


@needs_device
@pytest.mark.parametrize(
    ("serving", "kv"),
    [({"kv_dtype": "int8"}, "tied"), ({"kv_dtype": "int4", "kv_group": 4}, "grouped_tied")],
)
def test_a_models_step_is_that_of_plain_code(serving, kv, kernels_on, monkeypatch):  # noqa: ARG001, F811
    check_step(serving, kv, monkeypatch)
