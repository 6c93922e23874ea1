"""Logits equal those of `transformers` on the same weights, one-shot and stepwise."""

import pytest
import torch

from kvlab.model import GPT
from kvlab.spec import ModelConfig

transformers = pytest.importorskip("transformers", reason="the independent implementation")


def llama_state(theirs, layers):
    """A Llama or Mistral model's weights under our names."""
    state = theirs.state_dict()
    ours = {
        "token_embedding.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for layer in range(layers):
        mine, name = f"blocks.{layer}.", f"model.layers.{layer}."
        qkv = [state[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]
        gate_up = [state[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        ours |= {
            mine + "norm1.weight": state[name + "input_layernorm.weight"],
            mine + "norm2.weight": state[name + "post_attention_layernorm.weight"],
            mine + "attention.qkv.weight": torch.cat(qkv),
            mine + "attention.proj.weight": state[name + "self_attn.o_proj.weight"],
            mine + "mlp.up.weight": torch.cat(gate_up),
            mine + "mlp.down.weight": state[name + "mlp.down_proj.weight"],
        }
    return ours


def gpt2_state(theirs, layers):
    state = theirs.state_dict()
    ours = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "lm_head.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    names = {"norm1": "ln_1", "norm2": "ln_2", "attention.qkv": "attn.c_attn",
             "attention.proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}  # fmt: skip
    for layer in range(layers):
        for mine, name in names.items():
            weight = state[f"transformer.h.{layer}.{name}.weight"]
            turned = weight if name.startswith("ln") else weight.T  # Conv1D keeps (in, out)
            ours[f"blocks.{layer}.{mine}.weight"] = turned
            ours[f"blocks.{layer}.{mine}.bias"] = state[f"transformer.h.{layer}.{name}.bias"]
    return ours


def compare(theirs, ours, count):
    theirs.eval()
    torch.manual_seed(1)
    text = torch.randint(0, 90, (2, count))
    with torch.inference_mode():
        wanted = theirs(text).logits
        assert (ours(text) - wanted).abs().max() < 1e-4
        cache = ours.new_cache(2, count)
        steps = [ours(text[:, i : i + 1], cache=cache) for i in range(count)]
        assert (torch.cat(steps, 1) - wanted).abs().max() < 1e-4


def randomise(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def test_gpt2():
    shape = transformers.GPT2Config(
        vocab_size=90, n_positions=48, n_embd=32, n_layer=3, n_head=4,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(shape)
    randomise(theirs)
    ours = GPT(ModelConfig(vocab_size=90, block_size=48, n_layer=3, n_head=4, n_embd=32))
    ours.load_state_dict(gpt2_state(theirs, 3))
    compare(theirs, ours, 40)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(kv_heads):
    shape = transformers.LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=kv_heads, rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(shape)
    randomise(theirs)
    ours = GPT(llama_config(kv_heads))
    ours.load_state_dict(llama_state(theirs, 3))
    compare(theirs, ours, 40)


def llama_config(kv_heads, **more):
    return ModelConfig(
        vocab_size=90, block_size=64, n_layer=3, n_head=4, n_kv_head=kv_heads, n_embd=32,
        ffn_dim=48, position="rope", norm="rmsnorm", mlp="swiglu", bias=False,
        tie_embeddings=False, **more,
    )  # fmt: skip


def test_mistral_past_twice_its_window():
    shape = transformers.MistralConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=9,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.MistralForCausalLM(shape)
    randomise(theirs)
    ours = GPT(llama_config(2, attention_pattern="L", window=9))
    ours.load_state_dict(llama_state(theirs, 3))
    compare(theirs, ours, 40)
