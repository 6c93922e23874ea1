"""Numbers of articles beside the exact ones, for `formula` in `reports/claims.yaml`.

Why they differ stands in `kvlab/benchmark/README.md`. Sources: `Implementing Character.AI's Memory
Optimizations in nanoGPT`, `Accelerating transformer inference on my RTX 4090` (2023), the Llama
KV-cache note, and the video `The KV Cache: Memory Usage in Transformers` (2023).
"""

from dataclasses import dataclass

from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.roofline_model import decode_flops
from kvlab.spec import ServingConfig
from kvlab.spec.flops import forward_flops
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.presets import PRESETS


@dataclass(frozen=True)
class Claim:
    """One number of an article.

    Attributes:
        unit: of both numbers: bytes or FLOPs.
        claimed: the article's number.
        exact: the right number.
    """

    name: str
    unit: str
    claimed: float
    exact: int


def article_claims() -> list[Claim]:
    """Return the claims of the Character.AI article, the RTX 4090 article, the note, the video."""
    gpt2, xl, gpt3, llama, video = (
        ModelConfig.model_validate(PRESETS[name])
        for name in ("gpt2", "gpt2-xl", "gpt3-175b", "llama-7b", "video-30b")
    )
    # the article's model: MQA, five of six layers local, rotary positions, ties
    hybrid = {"n_kv_head": 1, "position": "rope", "window": 256, "attention_pattern": "GLLLLL"}
    reduced = ModelConfig.model_validate({**PRESETS["gpt3-175b"], **hybrid})
    tied = KVLayout.of(reduced, ServingConfig(tie="character-ai"))
    once, twice = (KVLayout.of(video).stored_bytes(128, n * 1024, "float16") for n in (1, 2))
    early, late = (decode_flops(gpt2, length) for length in (128, 1024))
    task_flops = sum(forward_flops(xl, length) for length in range(256, 512))
    return [
        Claim(
            "GPT-3 175B at 1,024 tokens, baseline", "bytes", 4.5e9,
            KVLayout.of(gpt3).stored_bytes(1, 1024, "float16"),
        ),
        Claim(
            "GPT-3 175B at 1,024 tokens, all reductions", "bytes", 115.2e6,
            tied.stored_bytes(1, 1024, "float16"),
        ),
        Claim(
            "GPT-2 XL, one sequence of 512 tokens", "bytes", 0.29 * 2**30,
            KVLayout.of(xl).stored_bytes(1, 512, "float32"),
        ),
        Claim("GPT-2 XL, FLOPs of one uncached task", "FLOPs", 1.04e14, task_flops),
        Claim(
            "Llama 7B at 10,000 tokens", "bytes", 5_242_880_000,
            KVLayout.of(llama).stored_bytes(1, 10_000, "float16"),
        ),
        Claim("30B, 128 sequences of 1,024 tokens", "bytes", 180e9, once),
        # the video says that the cache grows quadratically, and that the work does not grow
        Claim("30B, 128 sequences of 2,048 tokens", "bytes", 4.0 * once, twice),
        Claim("GPT-2 124M, FLOPs of the 1,024th token", "FLOPs", float(early), late),
    ]  # fmt: skip
