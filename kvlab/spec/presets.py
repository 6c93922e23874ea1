"""Model shapes by name. Sources: the GPT-2 and GPT-3 papers, Llama (arXiv 2302.13971), and the
published configurations of Llama 3 (arXiv 2407.21783), Qwen3 (arXiv 2505.09388), DeepSeek-V2 (arXiv
2405.04434), DeepSeek-V3 (arXiv 2412.19437), gpt-oss (arXiv 2508.10925) and Gemma 3 (arXiv
2503.19786).

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

_LLAMA_3 = {
    **_LLAMA, "vocab_size": 128_256, "block_size": 8192, "n_kv_head": 8, "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}  # fmt: skip
_QWEN3 = {
    **_LLAMA, "vocab_size": 151_936, "block_size": 32_768, "n_kv_head": 8, "head_dim": 128,
    "rope_theta": 1_000_000.0, "qk_norm": True,
}  # fmt: skip

_GPT_OSS = {
    **_LLAMA, "vocab_size": 201_088, "block_size": 131_072, "n_head": 64, "n_kv_head": 8,
    "n_embd": 2880, "head_dim": 64, "ffn_dim": 4 * 2880, "norm_eps": 1e-5, "bias": True,
    "rope_theta": 150_000.0, "window": 128, "attention_pattern": "LG", "sink": "learned",
    "rope_scaling": {"by": "yarn", "factor": 32.0, "original": 4096, "truncate": False},
}  # fmt: skip
_GEMMA_3: dict[str, Any] = {
    **_LLAMA, "vocab_size": 262_208, "block_size": 131_072, "head_dim": 256, "window": 1024,
    "attention_pattern": "LLLLLG", "rope_theta": 10_000.0, "mlp": "geglu", "qk_norm": True,
    "norm_placement": "sandwich", "tie_embeddings": True,
    "global": {"rope_theta": 1e6, "rope_scaling": {"by": "linear", "factor": 8.0}},
}  # fmt: skip

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
    "llama-3-8b": {**_LLAMA_3, "n_layer": 32, "n_head": 32, "n_embd": 4096, "ffn_dim": 14336},
    "llama-3-70b": {**_LLAMA_3, "n_layer": 80, "n_head": 64, "n_embd": 8192, "ffn_dim": 28672},
    "llama-3-405b": {
        **_LLAMA_3, "block_size": 131_072, "n_layer": 126, "n_head": 128, "n_embd": 16384,
        "ffn_dim": 53248,
    },
    "llama-3.2-1b": {
        **_LLAMA_3, "block_size": 131_072, "n_layer": 16, "n_head": 32, "n_embd": 2048,
        "ffn_dim": 8192, "tie_embeddings": True,
    },
    "llama-3.2-3b": {
        **_LLAMA_3, "block_size": 131_072, "n_layer": 28, "n_head": 24, "n_embd": 3072,
        "ffn_dim": 8192, "tie_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3, "n_layer": 28, "n_head": 16, "n_embd": 1024, "ffn_dim": 3072,
        "tie_embeddings": True,
    },
    "qwen3-1.7b": {
        **_QWEN3, "n_layer": 28, "n_head": 16, "n_embd": 2048, "ffn_dim": 6144,
        "tie_embeddings": True,
    },
    "qwen3-4b": {
        **_QWEN3, "n_layer": 36, "n_head": 32, "n_embd": 2560, "ffn_dim": 9728,
        "tie_embeddings": True,
    },
    "qwen3-8b": {**_QWEN3, "n_layer": 36, "n_head": 32, "n_embd": 4096, "ffn_dim": 12288},
    "qwen3-14b": {**_QWEN3, "n_layer": 40, "n_head": 40, "n_embd": 5120, "ffn_dim": 17408},
    "qwen3-32b": {**_QWEN3, "n_layer": 64, "n_head": 64, "n_embd": 5120, "ffn_dim": 25600},
    "gpt-oss-20b": {**_GPT_OSS, "n_layer": 24},
    "gpt-oss-120b": {**_GPT_OSS, "n_layer": 36},
    "gemma-3-1b": {
        **_GEMMA_3, "vocab_size": 262_144, "block_size": 32_768, "n_layer": 26, "n_head": 4,
        "n_kv_head": 1, "n_embd": 1152, "ffn_dim": 6912, "window": 512,
        "global": {"rope_theta": 1e6}, "embedding_scale": 1152**0.5,
    },
    "gemma-3-4b": {
        **_GEMMA_3, "n_layer": 34, "n_head": 8, "n_kv_head": 4, "n_embd": 2560, "ffn_dim": 10_240,
        "embedding_scale": 2560**0.5,
    },
    "gemma-3-12b": {
        **_GEMMA_3, "n_layer": 48, "n_head": 16, "n_kv_head": 8, "n_embd": 3840,
        "ffn_dim": 15_360, "embedding_scale": 3840**0.5,
    },
    "gemma-3-27b": {
        **_GEMMA_3, "n_layer": 62, "n_head": 32, "n_kv_head": 16, "head_dim": 128, "n_embd": 5376,
        "ffn_dim": 21_504, "embedding_scale": 5376**0.5, "attention_scale": 168**-0.5,
    },
    "deepseek-v2-lite": {
        **_LLAMA, "vocab_size": 102_400, "block_size": 32_768, "n_layer": 27, "n_head": 16,
        "n_embd": 2048, "head_dim": 128, "ffn_dim": 8 * 1408, "kv": {"latent": 512, "rotary": 64},
    },
    "deepseek-v3": {
        **_LLAMA, "vocab_size": 129_280, "block_size": 131_072, "n_layer": 61, "n_head": 128,
        "n_embd": 7168, "head_dim": 128, "ffn_dim": 9 * 2048,
        "kv": {"latent": 512, "rotary": 64, "query": 1536},
    },
}  # fmt: skip

_ACTIVE = (
    "its experts count as one dense MLP as wide as those that a token passes through, so"
    " parameters, weights and FLOPs are those that are active"
)

PRESET_NOTES: dict[str, str] = {
    "deepseek-v2-lite": _ACTIVE,
    "deepseek-v3": _ACTIVE,
    **{
        name: f"{_ACTIVE}; its SwiGLU is not clamped"
        for name in PRESETS
        if name.startswith("gpt-oss-")
    },
}  # fmt: skip
"""What a preset leaves out of the published model; it changes no byte of K/V."""
