"""Shapes of the published configurations of DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv
2412.19437)."""

from typing import Any

_DEEPSEEK: dict[str, Any] = {
    "position": "rope", "norm": "rmsnorm", "norm_eps": 1e-6, "mlp": "swiglu", "bias": False,
    "tie_embeddings": False, "head_dim": 128,
}  # fmt: skip

DEEPSEEK_V2_LITE = {
    **_DEEPSEEK, "vocab_size": 102_400, "block_size": 32_768, "n_layer": 27, "n_head": 16,
    "n_embd": 2048, "ffn_dim": 8 * 1408, "kv": {"latent": 512, "rotary": 64},
}  # fmt: skip
DEEPSEEK_V3 = {
    **_DEEPSEEK, "vocab_size": 129_280, "block_size": 131_072, "n_layer": 61, "n_head": 128,
    "n_embd": 7168, "ffn_dim": 9 * 2048, "kv": {"latent": 512, "rotary": 64, "query": 1536},
}  # fmt: skip
