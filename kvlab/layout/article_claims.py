"""The articles' numbers beside the exact ones, each difference explained in a sentence.

Sources: `Implementing Character.AI's Memory Optimizations in nanoGPT`, `Accelerating transformer
inference on my RTX 4090` (2023), the Llama KV-cache note, and the video `The KV Cache: Memory Usage
in Transformers` (2023). MB is 10^6 bytes, MiB is 2^20.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.layout.kv_layout import KVLayout
from kvlab.spec import ServingConfig
from kvlab.spec.flops import decode_flops, forward_flops, parameter_count
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.presets import PRESETS

HYBRID = {"n_kv_head": 1, "position": "rope", "window": 256, "attention_pattern": "GLLLLL"}
"""The Character.AI article's model: MQA, five of six layers local, rotary positions."""

TIED = ServingConfig(tie="character-ai")


@dataclass(frozen=True)
class Claim:
    """One number of an article.

    Attributes:
        unit: of both numbers: bytes, sequences or FLOPs.
        printed: as the article prints it.
        claimed: the same in ``unit``; None where the article gives none.
        exact: the right number.
        why: what makes the difference.
    """

    name: str
    unit: str
    printed: str
    claimed: float | None
    exact: int
    why: str


def _kv_bytes(
    size: tuple[str, int, str], serving: ServingConfig, changes: Mapping[str, Any]
) -> int:
    """Return the bytes of one sequence; ``size`` is a preset, the tokens, and the dtype."""
    preset, context, dtype = size
    model = ModelConfig.model_validate({**PRESETS[preset], **changes})
    return KVLayout.of(model, serving).stored_bytes(1, context, dtype)


def article_claims() -> list[Claim]:
    """Return the claims of the Character.AI article, the RTX 4090 article, the note, the video."""
    return [*_character_ai_claims(), *_rtx_4090_claims(), _llama_claim(), *_video_claims()]


def _character_ai_claims() -> list[Claim]:
    untied, mib = ServingConfig(), 2**20
    small = ("gpt2", 1024, "float32")
    large = ("gpt3-175b", 1024, "float16")
    return [
        Claim(
            "GPT-2 124M, + KV cache", "bytes", "80 MB (1359 - 1279 MiB)", 80 * mib,
            _kv_bytes(small, untied, {}),
            "The article subtracts two peaks of the allocator, which round and also hold other"
            " tensors; the cache itself is 72 MiB.",
        ),
        Claim(
            "GPT-2 124M, + MQA", "bytes", "6.6 MB", 6.6e6,
            _kv_bytes(small, untied, {"n_kv_head": 1}),
            "One K/V head of twelve is exactly a twelfth: 6.29 MB, which is 6.0 MiB; 6.6 is"
            " neither.",
        ),
        Claim(
            "GPT-2 124M, + windows, one cache a layer", "bytes", "6 MiB (1196 - 1190 MiB)",
            6 * mib, _kv_bytes(small, untied, HYBRID),
            "The article's code keeps full-length buffers for local layers, so its windows save"
            " nothing; rings of 256 tokens bring 2.25 MiB.",
        ),
        Claim(
            "GPT-2 124M, + sharing", "bytes", "2 MB, 40x (1192 - 1190 MiB)", 2 * mib,
            _kv_bytes(small, TIED, HYBRID),
            "2 MiB is one segment of the allocator, the least that a peak can differ by; one"
            " global and four local slots hold 1 MiB, 72x less than the baseline.",
        ),
        Claim(
            "GPT-2 124M, + sharing, full-length buffers as in the article's code", "bytes",
            "2 MB, 40x", 2 * mib, _kv_bytes(small, TIED, {**HYBRID, "window": 1024}),
            "Five slots of full length hold 2.5 MiB: 28.8x less than the baseline, not 40x.",
        ),
        Claim(
            "GPT-3 175B at 1,024 tokens, baseline", "bytes", "4.5 GB", 4.5e9,
            _kv_bytes(large, untied, {}),
            "Right in GiB: 4.5 GiB is 4.83 GB.",
        ),
        Claim(
            "GPT-3 175B at 1,024 tokens, all reductions", "bytes", "115.2 MB", 115.2e6,
            _kv_bytes(large, TIED, HYBRID),
            "The article divides 4.5 GB by its 40; but MQA alone is 1/96 here, not 1/12, and 96"
            " layers have one global and 32 local slots.",
        ),
    ]  # fmt: skip


def _rtx_4090_claims() -> list[Claim]:
    model = ModelConfig.model_validate(PRESETS["gpt2-xl"])
    layout, weights = KVLayout.of(model), parameter_count(model)
    available = 24 * 2**30 - 7 * 2**28
    single, half = (layout.stored_bytes(1, 512, dtype) for dtype in ("float32", "float16"))
    return [
        Claim(
            "GPT-2 XL, one sequence of 512 tokens", "bytes", "0.29 GiB", 0.29 * 2**30, single,
            "614,400 bytes a token, as the article says: 0.293 GiB.",
        ),
        Claim(
            "GPT-2 XL, largest batch in float32", "sequences", "32", 32,
            (available - 4 * weights) // single,
            "24 GiB less 1.75 GiB of the screen and 5.8 GiB of weights hold 56 caches of 512"
            " tokens; a limit of 32 comes from memory beside the cache, not from it.",
        ),
        Claim(
            "GPT-2 XL, largest batch in float16", "sequences", "81", 81,
            (available - 2 * weights) // half,
            "The same card has room for 132 caches in float16; the article's 81 are what its"
            " logits, activations and copied buffers left of that.",
        ),
        Claim(
            "GPT-2 XL, FLOPs of one uncached task", "FLOPs", "1.04e14", 1.04e14,
            sum(forward_flops(model, length) for length in range(256, 512)),
            "The article counts the MLP of one layer instead of 48, leaves out the attention's"
            " output projection, and swaps the two coefficients of its polynomial.",
        ),
    ]  # fmt: skip


def _llama_claim() -> Claim:
    return Claim(
        "Llama 7B at 10,000 tokens", "bytes", "5,24,28,80,000", 5_242_880_000,
        _kv_bytes(("llama-7b", 10_000, "float16"), ServingConfig(), {}),
        "The number is right; the printed formula has d_model where the 32 layers belong.",
    )  # fmt: skip


def _video_claims() -> list[Claim]:
    large, small = (ModelConfig.model_validate(PRESETS[name]) for name in ("video-30b", "gpt2"))
    once, twice = (KVLayout.of(large).stored_bytes(128, n * 1024, "float16") for n in (1, 2))
    early, late = (decode_flops(small, length) for length in (128, 1024))
    return [
        Claim(
            "30B, 128 sequences of 1,024 tokens", "bytes", "180 GB", 180e9, once,
            "The video's factors, with a width of 7,168 where it says about 7,000.",
        ),
        Claim(
            "30B, 128 sequences of 2,048 tokens", "bytes", "quadratic growth", 4.0 * once, twice,
            "Twice the tokens are twice the bytes: the cache grows linearly, and the work without a"
            " cache quadratically.",
        ),
        Claim(
            "GPT-2 124M, FLOPs of the 1,024th token", "FLOPs", "constant", float(early), late,
            "After 128 tokens it is less: attention to what is cached grows with the context.",
        ),
    ]  # fmt: skip
