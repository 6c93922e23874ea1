"""Model shapes by name. Sources: the GPT-2 and GPT-3 papers, Llama (arXiv 2302.13971), and the
published configurations of Llama 3 (arXiv 2407.21783), Qwen3 (arXiv 2505.09388), gpt-oss (arXiv
2508.10925) and Gemma 3 (arXiv 2503.19786).

`video-30b` is the 30B-parameter example of the KV-cache video (48 layers, width 7168).
"""

from typing import Any

from kvlab.own_extensions import find_members

_GPT2 = {"vocab_size": 50257, "block_size": 1024}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "block_size": 2048, "position": "rope", "norm": "rmsnorm",
    "norm_eps": 1e-6, "mlp": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip

_LLAMA_3 = {
    **_LLAMA, "vocab_size": 128_256, "block_size": 8192, "n_kv_head": 8, "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}  # fmt: skip
_LLAMA_3_2 = {**_LLAMA_3, "block_size": 131_072, "tie_embeddings": True}
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


def _shape(
    family: dict[str, Any], n_layer: int, n_head: int, n_embd: int, ffn_dim: int = 0, **more: Any
) -> dict[str, Any]:
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return {**family, **sizes, **({"ffn_dim": ffn_dim} if ffn_dim else {}), **more}


# family, layers, heads, width and, where it is not 4 times the width, that of the MLP
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _shape(_GPT2, 12, 12, 768),
    "gpt2-medium": _shape(_GPT2, 24, 16, 1024),
    "gpt2-large": _shape(_GPT2, 36, 20, 1280),
    "gpt2-xl": _shape(_GPT2, 48, 25, 1600),
    "gpt3-175b": _shape(_GPT2, 96, 96, 12288, block_size=2048),
    "video-30b": _shape(_GPT2, 48, 56, 7168),
    "llama-7b": _shape(_LLAMA, 32, 32, 4096, 11008),
    "llama-13b": _shape(_LLAMA, 40, 40, 5120, 13824),
    "llama-3-8b": _shape(_LLAMA_3, 32, 32, 4096, 14336),
    "llama-3-70b": _shape(_LLAMA_3, 80, 64, 8192, 28672),
    "llama-3-405b": _shape(_LLAMA_3, 126, 128, 16384, 53248, block_size=131_072),
    "llama-3.2-1b": _shape(_LLAMA_3_2, 16, 32, 2048, 8192),
    "llama-3.2-3b": _shape(_LLAMA_3_2, 28, 24, 3072, 8192),
    "qwen3-0.6b": _shape(_QWEN3, 28, 16, 1024, 3072, tie_embeddings=True),
    "qwen3-1.7b": _shape(_QWEN3, 28, 16, 2048, 6144, tie_embeddings=True),
    "qwen3-4b": _shape(_QWEN3, 36, 32, 2560, 9728, tie_embeddings=True),
    "qwen3-8b": _shape(_QWEN3, 36, 32, 4096, 12288),
    "qwen3-14b": _shape(_QWEN3, 40, 40, 5120, 17408),
    "qwen3-32b": _shape(_QWEN3, 64, 64, 5120, 25600),
    "gpt-oss-20b": {**_GPT_OSS, "n_layer": 24},
    "gpt-oss-120b": {**_GPT_OSS, "n_layer": 36},
    "gemma-3-1b": {
        **_shape(_GEMMA_3, 26, 4, 1152, 6912, n_kv_head=1, embedding_scale=1152**0.5),
        "vocab_size": 262_144, "block_size": 32_768, "window": 512, "global": {"rope_theta": 1e6},
    },
    "gemma-3-4b": _shape(_GEMMA_3, 34, 8, 2560, 10_240, n_kv_head=4, embedding_scale=2560**0.5),
    "gemma-3-12b": _shape(_GEMMA_3, 48, 16, 3840, 15_360, n_kv_head=8, embedding_scale=3840**0.5),
    "gemma-3-27b": {
        **_shape(_GEMMA_3, 62, 32, 5376, 21_504, n_kv_head=16, embedding_scale=5376**0.5),
        "head_dim": 128, "attention_scale": 168**-0.5,
    },
    **find_members("presets"),
}  # fmt: skip

ACTIVE_EXPERTS = (
    "its experts count as one dense MLP as wide as those that a token passes through, so"
    " parameters, weights and FLOPs are those that are active"
)

PRESET_NOTES = {
    **find_members("preset_notes"),
    "gpt-oss-20b": f"{ACTIVE_EXPERTS}; its SwiGLU is not clamped",
    "gpt-oss-120b": f"{ACTIVE_EXPERTS}; its SwiGLU is not clamped",
}
"""What a preset leaves out of the published model; it changes no byte of K/V."""
