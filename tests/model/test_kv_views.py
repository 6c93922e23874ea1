"""K and V as views of what a token stores: tied, grouped-tied and latent attention."""

import pytest
import torch

from kvlab.cache import begin_one_shot_pass
from kvlab.layout.serving_estimate import RescaleError, rescale
from kvlab.model import GPT, decode_attention
from kvlab.model.attention import SeparateKV
from kvlab.model.attention_backends import scaled_dot_product
from kvlab.model.decode_attention import Keys, decode_stored
from kvlab.model.rope import apply_rope, make_rope_table
from kvlab.spec import ModelConfig, load_served_model
from kvlab.spec.dtypes import KVStorage
from kvlab.spec.kv_forms import NAMED_FORMS, KVForm, LatentKV, StoredVectors
from tests.contracts.kv_form_contract import SHAPE, KVFormContract
from tests.support.random_model import random_model

FORMS = {
    "separate": {"n_kv_head": 2},
    "tied": {"kv": "tied", "n_kv_head": 2},
    "rotated_tied": {"kv": "rotated_tied", "n_kv_head": 2},
    "grouped_tied": {"kv": "grouped_tied", "n_kv_head": 2},
    "latent": {"kv": {"latent": 24, "rotary": 4}},
    "grouped latent": {"kv": {"latent": 10, "rotary": 4, "groups": 2}},
    "latent without rotation": {"kv": {"latent": 24}, "position": "learned"},
    "tied without rotation": {"kv": "tied", "position": "none"},
    "shared latent": {"kv": {"latent": 24, "rotary": 4, "query": 12}, "kv_sharing": [0, 1, 1]},
}


def config(form, **more):
    return ModelConfig(**{**SHAPE, **FORMS[form], **more})


class TestSeparate(KVFormContract):
    changes, numbers = FORMS["separate"], 2 * 2 * 8


class TestTied(KVFormContract):
    changes, numbers = FORMS["tied"], 2 * 8


class TestTiedWithoutRotation(KVFormContract):
    changes, numbers = FORMS["tied without rotation"], 4 * 8


class TestRotatedTied(KVFormContract):
    changes, numbers = FORMS["rotated_tied"], 2 * 8


class TestGroupedTied(KVFormContract):
    changes, numbers = FORMS["grouped_tied"], 2 * 8 + 4


class TestLatent(KVFormContract):
    changes, numbers = FORMS["latent"], 24 + 4


class TestGroupedLatent(KVFormContract):
    changes, numbers = FORMS["grouped latent"], 2 * 10 + 4


class TestLatentWithoutRotation(KVFormContract):
    changes, numbers = FORMS["latent without rotation"], 24


class TestSharedLatent(KVFormContract):
    changes, numbers = FORMS["shared latent"], 24 + 4


class MirroredKV(SeparateKV):
    """K is minus V, and V is stored."""

    def store(self, parts, rope):  # noqa: ARG002
        return parts

    def attend(self, q, parts, rope, attend):  # noqa: ARG002
        values = decode_stored(parts[0], q.dtype)
        return attend(q, Keys(-values), values)


class MirroredForm(KVForm):
    name, view, parts = "mirrored", f"{__name__}:MirroredKV", ("v",)

    def stored(self, layer):
        return (StoredVectors(layer.n_kv_head, layer.head_dim),)


class TestMirrored(KVFormContract):
    """A new form is a table line: a class of a test, by the name that a spec gives."""

    changes, numbers = {"kv": "mirrored", "position": "none", "n_kv_head": 2}, 2 * 8

    @pytest.fixture(autouse=True)
    def _enter(self, monkeypatch):
        monkeypatch.setitem(NAMED_FORMS, "mirrored", MirroredForm())


def test_every_form_of_the_table_has_a_contract_test():
    kinds = {
        type(t().config().kv_form) for t in KVFormContract.__subclasses__() if t != TestMirrored
    }
    assert kinds == {*map(type, NAMED_FORMS.values()), LatentKV}


def test_a_step_attends_to_latents_themselves_and_training_expands_them():
    view = GPT(config("latent")).blocks[0].attention.kv
    assert [view.is_absorbed(1, keys) for keys in (1, 2, 3, 9)] == [False, True, True, True]
    assert [view.is_absorbed(queries, 9) for queries in (2, 5, 6, 9)] == [True, True, False, False]


def test_queries_start_equal_and_one_tensor_for_k_and_v_starts_as_v():
    separate, tied = (GPT(config(form), seed=4) for form in ("separate", "tied"))
    ours, theirs = (m.blocks[1].attention.qkv.weight for m in (tied, separate))
    assert torch.equal(ours[:32], theirs[:32])
    assert torch.equal(ours[32:], theirs[48:])


@pytest.mark.parametrize(
    ("form", "flops"),  # of the scores and the sum of one key, for 4 heads of 8
    [
        ("separate", 2 * 4 * (8 + 8)),
        ("tied", 2 * 4 * (8 + 8) + 3 * 2 * 8),  # three for each number of a key that is rotated
        ("rotated_tied", 2 * 4 * (8 + 8)),
        ("latent", 2 * 4 * (24 + 4 + 24)),  # latent and rotary key, then the sum of latents
    ],
)
def test_flops_of_a_key(form, flops):
    layer = config(form).layers[0]
    assert layer.kv_form.flops_per_key(layer) == flops


def test_values_turn_with_their_distance_and_no_key_is_rotated_as_it_is_read(monkeypatch):
    """Logits do not change if all positions are larger, but they do if distances are."""
    monkeypatch.setattr(decode_attention, "_score_rotated", None)
    model = random_model(config("rotated_tied", attention_pattern="G", window=None))
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


def test_the_reductions_rescale_to_other_sizes():
    changes = {"model.position": "rope", "model.kv": {"latent": 256, "rotary": 32}}
    served = load_served_model("gpt2", changes)  # heads of 64
    large = rescale(served, "llama-7b").model  # heads of 128
    assert large.kv.model_dump() == {"latent": 512, "rotary": 64, "groups": 1, "query": None}
    with pytest.raises(RescaleError, match="do not scale to heads of 128 instead of 96"):
        rescale(load_served_model("gpt2", changes | {"model.head_dim": 96}), "llama-7b")


@pytest.mark.parametrize("block", [1, 2**17])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_keys_that_are_rotated_in_blocks_are_those_that_are_rotated_at_once(
    monkeypatch, block, rotary_dim
):
    monkeypatch.setattr(decode_attention, "BLOCK_NUMBERS", block)
    draw = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(3, 2, n, 8, generator=draw, dtype=torch.float64) for n in (4, 9))
    sink = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    for positions in (torch.arange(9), torch.arange(27).view(3, 9)):  # also of rows that differ
        table = make_rope_table(positions, rotary_dim, 100.0, torch.float64)
        keys = Keys(kv, table)
        mask = torch.rand(3, 1, 1, 9, generator=draw) < 0.7
        mask[..., 0] = True
        for visible, logits in ((None, None), (mask, sink)):
            actual = decode_attention.attend_blocks(q, keys, kv, visible, logits)
            rotated = apply_rope(kv, table)
            expected = scaled_dot_product(q, rotated, kv, visible, sink=logits)
            assert (actual - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("latent", "rotary", "fits"), [(256, 64, True), (272, 16, False)])
def test_the_widest_latents_that_attend_by_the_fused_kernel(latent, rotary, fits, monkeypatch):
    """The rotary key stands beside a latent, and does not count to its width."""
    monkeypatch.setattr(decode_attention, "are_kernels_usable", lambda _device: True)
    q, latents = torch.randn(1, 1, 4, rotary + latent), torch.randn(1, 1, 9, latent)
    keys = Keys(latents, shared=torch.randn(1, 1, 9, rotary))
    assert decode_attention.attends_by_triton(q, keys, latents) == fits


def test_shared_numbers_of_half_precision_keys_are_not_rounded_with_the_mask():
    """Beside a V that is larger than they, keys are joined: their scores stay in float32."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, 3, 48).bfloat16()
    shared, kv = torch.randn(2, 1, 50, 32).bfloat16(), torch.randn(2, 2, 50, 32).bfloat16()
    keys = Keys(kv, shared=shared, width=16)
    actual = decode_attention.attend_decoded(q, keys, kv, None, None, None)
    expected = scaled_dot_product(q, keys.to_dense(q.dtype), kv, None)
    assert torch.equal(actual, expected)
