"""K and V as views of what a token stores: tied, grouped-tied and latent attention."""

import pytest
import torch

from kvlab.layout import KVLayout, decode_flops, forward_flops, parameter_count
from kvlab.layout.serving_estimate import RescaleError, rescale
from kvlab.model import GPT, decode_attention
from kvlab.model.attention import SeparateKV
from kvlab.model.attention_backends import scaled_dot_product
from kvlab.model.decode_attention import Keys, decode_stored
from kvlab.model.generate import EagerDecoder, StaticDecoder, generate
from kvlab.model.rope import apply_rope, make_rope_table
from kvlab.spec import ModelConfig, ServingConfig, load_served_model
from kvlab.spec.kv_forms import NAMED_FORMS, KVForm, StoredVectors
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 41, "block_size": 64, "n_layer": 3, "n_head": 4, "n_embd": 32,
         "position": "rope", "attention_pattern": "GLL", "window": 7}  # fmt: skip
FORMS = {
    "separate": {"n_kv_head": 2},
    "tied": {"kv": "tied", "n_kv_head": 2},
    "grouped_tied": {"kv": "grouped_tied", "n_kv_head": 2},
    "latent": {"kv": {"latent": 24, "rotary": 4}},
    "grouped latent": {"kv": {"latent": 10, "rotary": 4, "groups": 2}},
    "latent without rotation": {"kv": {"latent": 24}, "position": "learned"},
    "tied without rotation": {"kv": "tied", "position": "none"},
    "shared latent": {"kv": {"latent": 24, "rotary": 4, "query": 12}, "kv_sharing": [0, 1, 1]},
}
NUMBERS = {  # a token stores in a layer: h d, h d + d / 2, d_c + d_r, g d_c + d_r
    "separate": 2 * 2 * 8, "tied": 2 * 8, "grouped_tied": 2 * 8 + 4, "latent": 24 + 4,
    "grouped latent": 2 * 10 + 4,
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2]]


def config(form, **more):
    return ModelConfig(**{**SHAPE, **FORMS[form], **more})


@pytest.mark.parametrize("form", NUMBERS)
def test_a_token_stores_as_many_numbers_as_the_papers_say(form):
    layout = KVLayout.of(config(form))
    assert layout.plans[0].token_bytes("float32") == 4 * NUMBERS[form]


@pytest.mark.parametrize("form", FORMS)
def test_decoding_of_any_kind_gives_the_tokens_of_whole_passes(form):
    model = random_model(config(form), std=0.3)
    cached = generate(model, PROMPTS, 25)
    assert cached == generate(model, PROMPTS, 25, cached=False)
    tokens = torch.randint(0, 41, (2, 20), generator=torch.Generator().manual_seed(1))
    caches = [model.new_cache(2, 20) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            model(tokens[:, :4], cache=cache)
        decoders = [EagerDecoder(model, caches[0]), StaticDecoder(model, caches[1])]
        for step in tokens[:, 4:].T:
            eager, static = (decoder(step) for decoder in decoders)
            assert (eager - static).abs().max() < 1e-10


def test_a_step_attends_to_latents_themselves_and_training_expands_them():
    view = GPT(config("latent")).blocks[0].attention.kv
    assert [view.is_absorbed(1, keys) for keys in (1, 2, 3, 9)] == [False, True, True, True]
    assert [view.is_absorbed(queries, 9) for queries in (2, 5, 6, 9)] == [True, True, False, False]


def test_queries_start_equal_and_one_tensor_for_k_and_v_starts_as_v():
    separate, tied = (GPT(config(form), seed=4) for form in ("separate", "tied"))
    ours, theirs = (m.blocks[1].attention.qkv.weight for m in (tied, separate))
    assert torch.equal(ours[:32], theirs[:32])
    assert torch.equal(ours[32:], theirs[48:])


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


@pytest.mark.parametrize(
    "serving",
    [{}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"tie": "adjacent:2"}, {"evict": {"keep": 9}}],
    ids=str,
)
def test_a_form_defined_elsewhere_has_bytes_rings_ties_and_formats(monkeypatch, serving):
    monkeypatch.setitem(NAMED_FORMS, "mirrored", MirroredForm())
    shape = config("separate", position="none").model_copy(update={"kv": "mirrored"})
    how = ServingConfig(**serving)
    model = random_model(shape, std=0.3)
    tokens = torch.randint(0, 41, (2, 20), generator=torch.Generator().manual_seed(2))
    caches = [model.new_cache(2, 20, how) for _ in range(2)]
    assert caches[0].nbytes == KVLayout.of(shape, how).stored_bytes(2, 20, "float64")
    with torch.inference_mode():
        at_once = [model(tokens[:, i : i + 1], cache=caches[0]) for i in range(20)]
        split = [model(part, cache=caches[1]) for part in tokens.split([7, 1, 12], 1)]
        if not serving:
            assert (torch.cat(at_once, 1) - model(tokens)).abs().max() < 1e-10
    if "tie" not in serving:  # under which a layer reads its own K/V of a pass
        assert (torch.cat(at_once, 1) - torch.cat(split, 1)).abs().max() < 1e-10


@pytest.mark.parametrize("form", FORMS)
def test_flops_count_every_weight_and_every_pair(form):
    shape = config(form, tie_embeddings=True, n_layer=2, attention_pattern="G", window=None,
                   kv_sharing=[0, 0] if "shared" in form else "none")  # fmt: skip
    model = GPT(shape)
    assert parameter_count(shape) == sum(p.numel() for p in model.parameters())
    weights = sum(p.numel() for name, p in model.named_parameters()
                  if p.dim() == 2 and "position" not in name)  # fmt: skip
    layer, tokens = shape.layers[0], 50
    is_latent = layer.kv_form.name == "latent"
    latent, rotary = (layer.kv_form.latent, layer.kv_form.rotary) if is_latent else (0, 0)
    pairs = 2 * 4 * 2 * (8 + rotary + 8) * tokens
    assert forward_flops(shape, tokens) == tokens * (2 * weights + pairs)
    if latent:  # scores with latent and rotary key, then the sum of latents
        pairs = 2 * 4 * 2 * (2 * latent + rotary) * tokens
    if form == "tied":  # three operations for each number of a key that is rotated
        pairs += 2 * 2 * 8 * 3 * tokens
    assert decode_flops(shape, tokens) == 2 * weights + pairs


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
