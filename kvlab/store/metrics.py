"""The table of metrics: every number that a trial can measure, by its name in the record.

Tasks of lm-eval have names by a rule, see `MetricTable`. A measured metric is added by an entry of
`METRICS` and a measurement of that name in a trial's stages. A derived one is added by an entry
with a function of the other measurements, and applies to all trials that were recorded before.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvlab.spec.conversations_config import MAX_REUSE_TURNS

Direction = Literal["lower", "higher", "neither"]


@dataclass(frozen=True)
class Metric:
    """One number that describes a trial.

    Attributes:
        title: for headings and tables.
        unit: printed after the number; empty for a share.
        better: which direction is an improvement.
        derive: of a metric that is not recorded: computes it from those that are. Returns None
            where it does not apply.
        rounding: a recorded value below it is rounding, and read as zero.
    """

    title: str
    unit: str
    better: Direction = "neither"
    derive: Callable[[Mapping[str, float]], float | None] | None = None
    rounding: float = 0.0

    @property
    def is_share(self) -> bool:
        """Whether it is a share of items: with few items, two seeds agree by chance."""
        return not self.unit


def derive_cache_speedup(measurements: Mapping[str, float]) -> float | None:
    """Return time per output token without a cache over that with it, medians at batch 1."""
    uncached, cached = measurements.get("tpot_ms_uncached_p50"), measurements.get("tpot_ms_p50")
    return uncached / cached if uncached and cached else None


def derive_needle_loss_change(measurements: Mapping[str, float]) -> float | None:
    """Return what serving adds to the loss of the needle's answer."""
    if not {"needle_loss", "needle_loss_served"} <= measurements.keys():
        return None
    return measurements["needle_loss_served"] - measurements["needle_loss"]


def derive_paired_loss(measurements: Mapping[str, float]) -> float | None:
    """Return the one-shot loss of the tokens that were scored served, in nats per token."""
    served, gap = measurements.get("loss_served"), measurements.get("serving_gap")
    if served is None or gap is None:
        return None
    if measurements.get("loss_tokens") == measurements.get("served_tokens"):
        return measurements.get("loss")
    return served - gap


def derive_paired_bits(measurements: Mapping[str, float]) -> float | None:
    """Return the one-shot bits per byte of the text that was scored served."""
    loss, served = derive_paired_loss(measurements), measurements.get("loss_served")
    bits = measurements.get("bits_per_byte_served")
    if loss is None or not served or bits is None:
        return None
    if measurements.get("loss_tokens") == measurements.get("served_tokens"):
        return measurements.get("bits_per_byte")
    return bits * loss / served  # the same tokens, so the same bytes


def derive_ttft_ratio(measurements: Mapping[str, float]) -> float | None:
    """Return the time to first token of the prompts that reuse shortened, warm over cold."""
    warm, cold = measurements.get("reuse_warm_ttft_ms"), measurements.get("reuse_cold_ttft_ms")
    return warm / cold if warm and cold else None


_CONTEXT_PARTS = {f"loss_part{i}": f"loss in part {i} of 8 of the context" for i in range(1, 9)}
_POSITION_METRICS = {
    f"{name}{suffix}": Metric(f"{title}, {scoring}", "nats/token", "lower")
    for name, title in {**_CONTEXT_PARTS, "loss_beyond": "loss beyond the trained length"}.items()
    for suffix, scoring in (("", "one-shot"), ("_served", "served"))
}
KL_ROUNDING = 1e-10
"""Nats per token. A plain float32 cache has 1e-14, a bfloat16 cache of a trained model 1e-8."""

_SERVING_CHANGES = {
    "serving_kl": ("KL(one-shot || served) of the next token", "nats/token", KL_ROUNDING),
    "serving_top_changed": ("positions whose top token serving changes", "", 0.0),
}
_SERVING_CHANGE_METRICS = {
    name: Metric(title, unit, "lower", rounding=rounding)
    for name, (title, unit, rounding) in _SERVING_CHANGES.items()
} | {
    f"{name}_{part}": Metric(f"{title}, {where}", unit, rounding=rounding)
    for name, (title, unit, rounding) in _SERVING_CHANGES.items()
    for part, where in {
        "stderr": "standard error over windows",
        **{f"part{i}": f"part {i} of 8 of the context" for i in range(1, 9)},
    }.items()
}

REUSE_GAP_ROUNDING = 1e-5
"""Nats per token. Warm and cold prompts pass through matrix products of other shapes."""

_REUSE_METRICS = {
    "reuse_hit_rate": Metric("prompt tokens found by reuse between turns", "", "higher"),
    "reuse_hit_rate_exact": Metric("prompt tokens that any earlier turn has", "", "neither"),
    **{
        f"reuse_hit_rate_turn{turn}": Metric(
            f"prompt tokens found by reuse, turn {turn}", "", "higher"
        )
        for turn in range(1, MAX_REUSE_TURNS + 1)
    },
    "reuse_flops_saved": Metric("FLOPs of prompts saved by reuse", "", "higher"),
    "reuse_warm_ttft_ms": Metric("time to first token of reused prompts, warm", "ms", "lower"),
    "reuse_cold_ttft_ms": Metric("time to first token of the same prompts, cold", "ms", "lower"),
    "reuse_ttft_ratio": Metric(
        "time to first token of reused prompts, warm over cold",
        "times",
        "lower",
        derive_ttft_ratio,
    ),
    "reuse_gap": Metric(
        "reuse gap (warm minus cold loss of replies)",
        "nats/token",
        "lower",
        rounding=REUSE_GAP_ROUNDING,
    ),
    "reuse_kl": Metric("KL(cold || warm) of replies", "nats/token", "lower", rounding=KL_ROUNDING),
    "reuse_top_changed": Metric("reply tokens whose top token reuse changes", "", "lower"),
    "reuse_conversation_bytes": Metric("prefix cache of a conversation", "bytes", "lower"),
    "reuse_conversations": Metric(
        "conversations that fit the prefix cache", "conversations", "higher"
    ),
    "reuse_bytes_held": Metric("bytes held by the prefix cache, at most", "bytes"),
    "reuse_evictions": Metric("evictions from the prefix cache", "evictions", "lower"),
    "reuse_requests": Metric("requests of the load of conversations", "requests"),
}
"""What a prefix cache reuses between the turns of `benchmark.conversations`."""

_LM_EVAL_UNITS: dict[str, tuple[str, Direction]] = {
    "acc": ("", "higher"),
    "acc_norm": ("", "higher"),
    "acc_bytes": ("", "higher"),
    "acc_mutual_info": ("", "higher"),
    "exact_match": ("", "higher"),
    "f1": ("", "higher"),
    "mcc": ("coefficient", "higher"),
    "likelihood_diff": ("nats", "neither"),
    "pct_stereotype": ("", "neither"),
    "perplexity": ("perplexity", "lower"),
    "word_perplexity": ("perplexity", "lower"),
    "byte_perplexity": ("perplexity", "lower"),
    "bits_per_byte": ("bits/byte", "lower"),
    "bleu": ("BLEU", "higher"),
    "chrf": ("chrF", "higher"),
    "ter": ("TER", "lower"),
    "items": ("items", "neither"),
}
"""Units and directions of lm-eval's metrics. Another metric has a score without a direction."""

LM_EVAL_PREFIX = "lm_eval_"
_LM_EVAL_NAME = re.compile(
    rf"{LM_EVAL_PREFIX}(?P<task>[a-z0-9_]+?)"
    rf"(?:_(?P<metric>{'|'.join(sorted(_LM_EVAL_UNITS, key=len, reverse=True))}))?"
    r"(?P<served>_served)?"
)


class MetricTable(dict[str, Metric]):
    """Metrics by name; iteration yields those with an entry.

    ``lm_eval_<task>_<metric>``, with ``_served`` through the serving cache, are metrics without
    an entry: which tasks there are is known from a sweep alone.
    """

    def __missing__(self, name: str) -> Metric:
        match = _LM_EVAL_NAME.fullmatch(name)
        if match is None:
            raise KeyError(name)
        unit, better = _LM_EVAL_UNITS.get(match["metric"] or "", ("score", "neither"))
        title = " ".join(filter(None, ["lm-eval", match["task"], match["metric"]]))
        return Metric(f"{title}, served" if match["served"] else title, unit, better)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and _LM_EVAL_NAME.fullmatch(name) is not None
        )

    def sort(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of ``names`` that are metrics, in the order of the table."""
        given = set(names)
        by_rule = sorted(
            (name for name in given - set(self) if name in self),
            key=lambda name: (name.removesuffix("_served"), name),
        )
        return (*(name for name in self if name in given), *by_rule)


METRICS = MetricTable(
    {
        "loss": Metric("validation loss, one-shot", "nats/token", "lower"),
        "loss_served": Metric("validation loss through the serving cache", "nats/token", "lower"),
        "loss_paired": Metric(
            "validation loss, one-shot, of the served text",
            "nats/token",
            "lower",
            derive_paired_loss,
        ),
        "serving_gap": Metric("serving gap (served minus one-shot loss)", "nats/token", "lower"),
        **_SERVING_CHANGE_METRICS,
        "kv_dtype_loss_change": Metric(
            "served loss, minus through the same cache in the model's dtype", "nats/token", "lower"
        ),
        "kv_dtype_logit_rms": Metric("logit error of the cache's dtype, root mean square", "nats"),
        "kv_dtype_logit_largest": Metric("logit error of the cache's dtype, largest", "nats"),
        "evicted_share": Metric("tokens before a query that eviction has dropped", ""),
        "bits_per_byte": Metric("bits per byte, one-shot", "bits/byte", "lower"),
        "bits_per_byte_served": Metric("bits per byte, served", "bits/byte", "lower"),
        "bits_per_byte_paired": Metric(
            "bits per byte, one-shot, of the served text", "bits/byte", "lower", derive_paired_bits
        ),
        "loss_unigram": Metric("loss of a unigram table of the training text", "nats/token"),
        "loss_bigram": Metric("loss of a bigram table of the training text", "nats/token"),
        "bigram_tokens": Metric("training tokens of the bigram table", "tokens"),
        "loss_tokens": Metric("validation tokens scored one-shot", "tokens"),
        "served_tokens": Metric("validation tokens scored through the cache", "tokens"),
        "hellaswag_acc": Metric("HellaSwag acc (completion style)", "", "higher"),
        "hellaswag_acc_norm": Metric("HellaSwag acc_norm (completion style)", "", "higher"),
        "hellaswag_acc_stderr": Metric("standard error of HellaSwag acc", ""),
        "hellaswag_acc_norm_stderr": Metric("standard error of HellaSwag acc_norm", ""),
        "hellaswag_acc_served": Metric("HellaSwag acc, served", "", "higher"),
        "hellaswag_acc_norm_served": Metric("HellaSwag acc_norm, served", "", "higher"),
        "hellaswag_lmeval_acc": Metric("HellaSwag acc (lm-eval style)", "", "higher"),
        "hellaswag_lmeval_acc_norm": Metric("HellaSwag acc_norm (lm-eval style)", "", "higher"),
        "hellaswag_lmeval_acc_served": Metric(
            "HellaSwag acc (lm-eval style), served", "", "higher"
        ),
        "hellaswag_lmeval_acc_norm_served": Metric(
            "HellaSwag acc_norm (lm-eval style), served", "", "higher"
        ),
        "hellaswag_items": Metric("HellaSwag items scored", "items"),
        "hellaswag_shortened": Metric("HellaSwag items whose context was cut to fit", "items"),
        "recall_acc": Metric("associative recall, one-shot", "", "higher"),
        "recall_acc_near": Metric("associative recall, at most 1/4 back", "", "higher"),
        "recall_acc_far": Metric("associative recall, over 1/2 back", "", "higher"),
        "recall_acc_served": Metric("associative recall, served", "", "higher"),
        "recall_acc_near_served": Metric(
            "associative recall, at most 1/4 back, served", "", "higher"
        ),
        "recall_acc_far_served": Metric("associative recall, over 1/2 back, served", "", "higher"),
        "recall_rows": Metric("associative recall rows", "rows"),
        "recall_pairs": Metric("associative recall pairs a row (chance is one in these)", "pairs"),
        "needle_loss": Metric("needle's answer, one-shot", "nats/token", "lower"),
        "needle_loss_served": Metric("needle's answer, served", "nats/token", "lower"),
        "needle_loss_absent": Metric("the same answer without the needle, one-shot", "nats/token"),
        "needle_loss_absent_served": Metric(
            "the same answer without the needle, served", "nats/token"
        ),
        "needle_loss_change": Metric(
            "needle's answer, served minus one-shot",
            "nats/token",
            "lower",
            derive_needle_loss_change,
        ),
        "needle_accuracy": Metric("answer tokens of the needle on top, one-shot", "", "higher"),
        "needle_accuracy_served": Metric(
            "answer tokens of the needle on top, served", "", "higher"
        ),
        "needle_chance": Metric("needle's answer guessed by token frequencies", "nats/token"),
        "needle_rows": Metric("rows of each length and depth of the needle probe", "rows"),
        **_POSITION_METRICS,
        "kv_bytes_formula": Metric("KV bytes by formula (batch 1, block size)", "bytes", "lower"),
        "kv_bytes_storage": Metric("KV bytes by unique storage", "bytes", "lower"),
        "kv_bytes_read": Metric("KV bytes read per decoded token at block size", "bytes", "lower"),
        "peak_bytes_cached": Metric("peak memory decoding with the cache", "bytes", "lower"),
        "peak_bytes_uncached": Metric("peak memory decoding without the cache", "bytes", "lower"),
        "peak_bytes_activations": Metric(
            "peak memory decoding with the cache, without weights, cache and logits",
            "bytes",
            "lower",
        ),
        "ttft_ms": Metric("time to first token (batch 1)", "ms", "lower"),
        "tpot_ms_p50": Metric("time per output token, p50 (batch 1)", "ms", "lower"),
        "tpot_ms_p95": Metric("time per output token, p95 (batch 1)", "ms", "lower"),
        "tpot_ms_p99": Metric("time per output token, p99 (batch 1)", "ms", "lower"),
        "tpot_ms_uncached_p50": Metric("time per output token without a cache, p50", "ms", "lower"),
        "tokens_per_second": Metric(
            "decoded tokens per second (largest batch)", "tokens/s", "higher"
        ),
        "cache_speedup": Metric(
            "time per token without a cache over with it", "times", "higher", derive_cache_speedup
        ),
        **_REUSE_METRICS,
        "training_tokens_per_second": Metric("training tokens per second", "tokens/s", "higher"),
        "training_flops_per_second": Metric("training model FLOPs per second", "FLOP/s", "higher"),
        "training_mfu": Metric("training MFU (share of the devices' peak)", "", "higher"),
        "training_peak_bytes": Metric("peak memory of training, of one device", "bytes", "lower"),
    }
)


@dataclass(frozen=True)
class MetricFamily:
    """Metrics that are taken together, for the reference.

    Attributes:
        beginnings: of the names of its metrics; a whole name ends with a blank.
        key: of the experiment that asks for them; empty if they are always taken.
        method: how they are taken.
        sections: of the report that show them.
    """

    title: str
    beginnings: tuple[str, ...]
    key: str
    method: str
    sections: tuple[str, ...]

    def holds(self, name: str) -> bool:
        return f"{name} ".startswith(self.beginnings)


FAMILIES: tuple[MetricFamily, ...] = (
    MetricFamily(
        "Validation loss",
        ("loss ", "loss_served ", "loss_paired ", "loss_tokens ", "served_tokens ", "bits_per_"),
        "evaluation.loss_tokens, evaluation.loss_bytes, evaluation.served_tokens",
        "Mean cross-entropy of the next token over windows of held-out text that are spread evenly."
        " One-shot: all tokens of a window in one pass. Served: token by token through the cache"
        " that serves. Bits per byte: the summed loss over the bytes of the scored tokens.",
        ("answer", "cells", "effects", "pareto", "equal-memory", "serving-gap", "curves"),
    ),
    MetricFamily(
        "Serving gap and divergence",
        ("serving_",),
        "evaluation.served",
        "Served against one-shot predictions of the same weights, at every token of the served"
        " text. The divergence is summed in float64; its standard error is over windows.",
        ("answer", "effects", "serving-gap"),
    ),
    MetricFamily(
        "Dtype of the cache",
        ("kv_dtype_",),
        "serving.kv_dtype",
        "The same text through the same cache in the dtype of the model, and the difference in"
        " logits and loss.",
        ("serving-gap",),
    ),
    MetricFamily(
        "Eviction",
        ("evicted_",),
        "serving.evict",
        "Of all tokens up to a query, the share that global layers no longer keep: mean over the"
        " queries of the served text, weighted by how many tokens each could see.",
        ("serving-gap",),
    ),
    MetricFamily(
        "Tables of single tokens and of pairs",
        ("loss_unigram ", "loss_bigram ", "bigram_tokens "),
        "",
        "Counted in the windows that the training read, at most 20 million tokens, smoothed by"
        " token frequencies (MacKay and Peto 1995), scored on the text of the one-shot loss.",
        ("answer",),
    ),
    MetricFamily(
        "Loss by position",
        ("loss_part", "loss_beyond"),
        "evaluation.positions",
        "The loss of tokens in each eighth of the context, and in windows twice as long beyond"
        " the trained length, where the position scheme allows it.",
        ("probes",),
    ),
    MetricFamily(
        "HellaSwag",
        ("hellaswag_",),
        "evaluation.hellaswag",
        "Which of four endings is the likeliest (arXiv 1905.07830), by summed log-likelihood"
        " (acc) and by log-likelihood per token or byte (acc_norm), in two conventions.",
        ("hellaswag", "effects", "pareto"),
    ),
    MetricFamily(
        "Tasks of lm-eval",
        (LM_EVAL_PREFIX,),
        "evaluation.lm_eval",
        "EleutherAI's harness builds prompts and scores answers; the model gives log-likelihoods,"
        " one-shot and served. Names are lm_eval_<task>_<metric>, with _served through the cache.",
        ("lm-eval", "effects"),
    ),
    MetricFamily(
        "Associative recall",
        ("recall_",),
        "evaluation.recall",
        "Rows of random key and value pairs, then the keys again (arXiv 2312.04927): how often the"
        " value of the row that the model finds likeliest is the right one.",
        ("probes",),
    ),
    MetricFamily(
        "Needle in a haystack",
        ("needle_",),
        "evaluation.needle",
        "A key and an answer in validation text, the key again at its end: loss and accuracy of"
        " the answer's tokens, over all lengths and depths.",
        ("probes",),
    ),
    MetricFamily(
        "Bytes of the cache",
        ("kv_bytes_",),
        "",
        "Computed from the layout, and counted over the unique storages of a real cache; a trial"
        " whose two counts differ fails.",
        ("cells", "pareto", "memory"),
    ),
    MetricFamily(
        "Peak memory of decoding",
        ("peak_bytes_",),
        "benchmark.prompt_tokens, benchmark.new_tokens",
        "The largest memory of the process or device while it decodes at batch 1, weights"
        " included.",
        ("memory",),
    ),
    MetricFamily(
        "Speed of decoding",
        ("ttft_", "tpot_", "tokens_per_second ", "cache_speedup "),
        "benchmark.prompt_tokens, benchmark.new_tokens, benchmark.batch_sizes, benchmark.repeats",
        "Rounds after one warm-up, cached and uncached in turn, until the median is known to 5% or"
        " the time is over. Percentiles are over steps.",
        ("speed", "pareto", "effects"),
    ),
    MetricFamily(
        "Reuse between turns",
        ("reuse_",),
        "benchmark.conversations",
        "Every turn's prompt is the conversation so far. Hits, bytes and evictions are counted for"
        " the whole load at benchmark.conversations.budget; FLOPs are by formula. Times, and the"
        " losses of the replies, are of the first conversations, which the model serves warm (K/V"
        " of earlier turns restored) and cold (the whole prompt computed again).",
        ("reuse",),
    ),
    MetricFamily(
        "Training",
        ("training_",),
        "",
        "Tokens over seconds of the whole training; FLOPs by formula; the peak of memory over all"
        " steps. Rates are left out where trials shared a GPU.",
        ("effects",),
    ),
)
"""The families of metrics, in the order of the reference."""

OTHER = MetricFamily("Other", (), "", "See their entries in the table of metrics.", ("effects",))


def find_family(name: str) -> MetricFamily:
    """Return the family of a metric; `OTHER` for one that is in none."""
    return next((family for family in FAMILIES if family.holds(name)), OTHER)


def collect_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return a result's metrics by name, the recorded and the derived ones.

    What is below a metric's rounding is zero here, so that no comparison takes it for an effect.

    Args:
        result: contents of `result.json`.
    """
    metrics: dict[str, float] = {
        name: 0.0 if name in METRICS and abs(value) < METRICS[name].rounding else value
        for name, value in (result.get("measurements") or {}).items()
    }
    for name, metric in METRICS.items():
        value = metric.derive(metrics) if metric.derive and name not in metrics else None
        if value is not None and math.isfinite(value):
            metrics[name] = value
    return metrics


# Other machines

TOLERANCES: dict[str, float] = {
    "nats/token": 2e-3,
    "nats": 2e-3,
    "bits/byte": 3e-3,
    "": 0.01,
}
"""By unit: largest difference of two records of one trial that were made on different hardware,
with another number of threads or without the CPU kernels. These round differently, and a training
multiplies roundings. Measured on eight quickstart-like trials, with kernels and plain: 4e-5
nats/token one-shot, 5e-4 where a cache is tied, and 0.0015 of the shares. One thread and two part
by 5e-7 (the quickstart's model, 64 steps). The losses of two seeds differ by 0.02. Settings that
are part of a trial have no tolerance: on that model bfloat16 moved the loss by 0.007. A compiled
training and an eager one part by 3e-6 over 20 steps, and by 0.0001 and 0.0019 after 128 (two
seeds)."""

OTHER_TOLERANCE = 0.01
"""The same of units that are not in `TOLERANCES`, as a share of the value."""

_EXACT_UNITS = (
    "bytes", "tokens", "items", "rows", "pairs", "conversations", "evictions", "requests",
)  # fmt: skip
_OF_THE_MACHINE = (
    "peak_bytes_",
    "ttft_",
    "tpot_",
    "tokens_per_second",
    "cache_speedup",
    "reuse_warm_ttft",
    "reuse_cold_ttft",
    "reuse_ttft",
    "training_",
)
"""Beginnings of metrics that measure a machine, not a model."""


def find_tolerance(name: str, value: float) -> float | None:
    """Return how far two records of one trial may differ in a metric.

    Args:
        value: In one of them.

    Returns:
        0 for counts, which are exact. None for what measures the machine and is not compared.
    """
    if name.startswith(_OF_THE_MACHINE):
        return None
    unit = METRICS[name].unit
    if unit in _EXACT_UNITS:
        return 0.0
    return TOLERANCES.get(unit, OTHER_TOLERANCE * abs(value))
