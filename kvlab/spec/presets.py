"""Model shapes by name. Sources: the GPT-2 and GPT-3 papers, Llama (arXiv 2302.13971).

`video-30b` is the 30B-parameter example of the KV-cache video (48 layers, width 7168).
"""

from typing import Any

_GPT2 = {"vocab_size": 50257, "block_size": 1024}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "block_size": 2048,
    "position": "rope",
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600},
    "gpt3-175b": {
        "vocab_size": 50257, "block_size": 2048, "n_layer": 96, "n_head": 96, "n_embd": 12288,
    },
    "video-30b": {
        "vocab_size": 50257, "block_size": 1024, "n_layer": 48, "n_head": 56, "n_embd": 7168,
    },
    "llama-7b": {**_LLAMA, "n_layer": 32, "n_head": 32, "n_embd": 4096, "ffn_dim": 11008},
    "llama-13b": {**_LLAMA, "n_layer": 40, "n_head": 40, "n_embd": 5120, "ffn_dim": 13824},
}  # fmt: skip
