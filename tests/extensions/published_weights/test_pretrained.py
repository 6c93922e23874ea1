"""Logits equal those of `transformers` on the same weights, one-shot and stepwise."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.errors import PretrainedError
from kvlab.extensions.published_weights.architectures import Llama
from kvlab.extensions.published_weights.pretrained import ARCHITECTURES, read_config
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec import ModelConfig
from tests.extensions.published_weights.architecture_contract import HFArchitectureContract

transformers = pytest.importorskip("transformers", reason="the independent implementation")


GPT2 = transformers.GPT2Config(
    vocab_size=90, n_positions=48, n_embd=32, n_layer=3, n_head=4,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
)  # fmt: skip
LLAMA = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
FULL, LOCAL = "full_attention", "sliding_attention"


def gpt2():
    return transformers.GPT2LMHeadModel(GPT2)


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **more))


class TestGPT2(HFArchitectureContract):
    model_type = "gpt2"
    unsupported = (
        ({"activation_function": "relu"}, "activation_function = relu is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
    )

    def reference_models(self):
        yield gpt2()


class TestLlama(HFArchitectureContract):
    model_type = "llama"
    unsupported = (
        ({"hidden_act": "gelu"}, "hidden_act = gelu is not supported; only silu"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type = llama3 is not supported"),
    )

    def reference_models(self):
        yield llama(num_key_value_heads=1)
        yield llama(num_key_value_heads=2, tie_word_embeddings=True)
        yield llama(num_key_value_heads=4, head_dim=16)


class TestMistral(HFArchitectureContract):
    model_type = "mistral"
    unsupported = (({"hidden_act": "gelu"}, "hidden_act = gelu is not supported; only silu"),)

    def reference_models(self):
        shape = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8}
        config = transformers.MistralConfig(**shape, sliding_window=9)  # four windows in the text
        yield transformers.MistralForCausalLM(config)


class TestSmolLM3(HFArchitectureContract):
    model_type = "smollm3"
    unsupported = (({"hidden_act": "gelu"}, "hidden_act = gelu is not supported; only silu"),)

    def reference_models(self):
        shape = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0}
        rotated = {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 9}
        types = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
        for more in ({}, {**rotated, "layer_types": types}):
            config = transformers.SmolLM3Config(**shape, **more)
            yield transformers.SmolLM3ForCausalLM(config)


class TestQwen3(HFArchitectureContract):
    model_type = "qwen3"
    unsupported = (
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu is not supported; only silu"),
    )

    def reference_models(self):
        shape = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8}
        yield transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
        longer = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
        config = transformers.Qwen3Config(**shape, rope_parameters=longer)
        yield transformers.Qwen3ForCausalLM(config)


class TestGemma3(HFArchitectureContract):
    model_type = "gemma3_text"
    rounding = 1e-5  # of 1 + w, which is w in a checkpoint
    unsupported = (
        ({"hidden_activation": "silu"}, "hidden_activation = silu is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "llama3"}}},
            "rope_type = llama3 is not supported; only default, linear or yarn is",
        ),
    )

    def reference_models(self):
        shape = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9}
        longer = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}}
        for more in (
            {"query_pre_attn_scalar": 8, "layer_types": [FULL, LOCAL, FULL]},
            {"query_pre_attn_scalar": 13, "rope_parameters": longer, "sliding_window_pattern": 2},
            {"layer_types": [LOCAL] * 3, "tie_word_embeddings": False},
            {"layer_types": [FULL] * 3},
        ):
            config = transformers.Gemma3TextConfig(**shape, **more)
            yield transformers.Gemma3ForCausalLM(config)


def test_every_architecture_has_its_suite():
    suites = {suite.model_type for suite in HFArchitectureContract.__subclasses__()}
    own = {name for name, one in ARCHITECTURES.items() if type(one).__module__ == Llama.__module__}
    assert own <= suites


@pytest.mark.parametrize("name", ["Llama", "Mistral", "SmolLM3", "Qwen3", "Gemma3Text"])
def test_settings_that_a_file_leaves_out_are_those_of_the_library(name, tmp_path):
    theirs = getattr(transformers, f"{name}Config")(**LLAMA, num_key_value_heads=2, head_dim=8)
    config = theirs.to_dict()
    del config["tie_word_embeddings"]
    if name == "Mistral":
        del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, ours = read_config(tmp_path)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    if name == "Mistral":
        assert ours.layers[0].window == theirs.sliding_window


def test_gpt2s_original_files_have_no_prefix(tmp_path):
    theirs = gpt2()
    theirs.transformer.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert torch.equal(ours.token_embedding.weight, theirs.transformer.wte.weight)


def test_every_mismatch_is_listed(tmp_path):
    llama(num_key_value_heads=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PretrainedError) as caught:
        GPT.from_pretrained(tmp_path)
    text = str(caught.value)
    assert not text.splitlines()[0].endswith(":"), "a sweep shows the first line alone"
    assert "model.layers.3.self_attn.q_proj.weight is missing" in text
    assert "mlp.down_proj.weight is (32, 48), not (32, 64)" in text
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    with pytest.raises(PretrainedError, match="model_type = other is not one of gpt2, llama"):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mlp.down_proj",
            lambda one: (100 * one).to(torch.int8),
            "is torch.int8, and only float16",
        ),
        ("self_attn.k_proj", lambda one: (100 * one).to(torch.int8), "is torch.int8, and only"),
        ("mlp.down_proj", lambda one: one.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn, and"),
        ("self_attn.k_proj", lambda one: one[:, 1:], r"is \(32, 32\) \+ \(\d+, 31\) \+ .* not"),
        ("self_attn.k_proj", lambda one: one[0], r"is \(32, 32\) \+ \(32,\) \+ .* not"),
        ("mlp.down_proj", lambda one: one[0, 0].clone(), r"is \(\), not \(32, 48\)"),
    ],
)
def test_codes_and_other_shapes_are_no_weights(tmp_path, name, change, message):
    """As quantized files have them, whose scales are tensors of other names."""
    llama().save_pretrained(tmp_path)
    path, name = tmp_path / "model.safetensors", f"model.layers.1.{name}.weight"
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path)
    with pytest.raises(PretrainedError, match=rf"{name}.* {message}"):
        GPT.from_pretrained(tmp_path)


def test_a_model_without_a_published_form_says_why(tmp_path):
    with pytest.raises(PretrainedError, match="not gpt2: n_kv_head is not 4; not llama: mlp"):
        GPT(ModelConfig(vocab_size=9, n_layer=2, n_head=4, n_kv_head=1, n_embd=8)).save_pretrained(
            tmp_path
        )


@pytest.mark.parametrize("scale", [1 / math.sqrt(24), 24**-0.5, 0.2041242, 8**-0.5, None])
def test_a_scale_of_attention_comes_back_to_its_last_bit(tmp_path, scale):
    model = GPT(
        ModelConfig(
            vocab_size=9, block_size=16, n_layer=1, n_head=2, n_embd=16, position="rope",
            norm="rmsnorm", mlp="geglu", bias=False, qk_norm=True, norm_placement="sandwich",
            embedding_scale=4.0, attention_scale=scale,
        )
    )  # fmt: skip
    assert model.save_pretrained(tmp_path) == "gemma3_text"
    assert GPT.from_pretrained(tmp_path).config.attention_scale == scale
    config = json.loads((tmp_path / "config.json").read_text()) | {"query_pre_attn_scalar": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))  # as others read it
    assert GPT.from_pretrained(tmp_path).config.attention_scale == 0.5


@pytest.mark.parametrize("preset", ["gpt-oss-20b", "gemma-3-27b"])
def test_bytes_of_presets_with_windows_equal_their_static_caches(preset):
    model, tokens = ModelConfig(preset=preset), 4096
    shape, windows = model.layers[0], [layer.window for layer in model.layers]
    kind = transformers.GptOssConfig if preset == "gpt-oss-20b" else transformers.Gemma3TextConfig
    theirs = transformers.StaticCache(
        config=kind(
            num_hidden_layers=model.n_layer, num_attention_heads=model.n_head,
            num_key_value_heads=shape.n_kv_head, head_dim=shape.head_dim,
            sliding_window=model.window,
        ),
        max_cache_len=tokens,
    )  # fmt: skip
    theirs.early_initialization(
        batch_size=1, num_heads=shape.n_kv_head, head_dim=shape.head_dim, dtype=torch.bfloat16,
        device="meta",
    )  # fmt: skip
    assert [one.keys.shape[2] for one in theirs.layers] == [w or tokens for w in windows]
    total = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers)
    assert KVLayout.of(model).stored_bytes(1, tokens, "bfloat16") == total
