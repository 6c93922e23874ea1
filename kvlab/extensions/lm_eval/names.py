"""Metrics of tasks: ``lm_eval_<task>_<metric>``, with ``_served`` through the cache."""

import re

from kvlab.store.metrics import Direction, Metric

_SHARES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "f1")
_PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")
_UNITS: dict[str, tuple[str, Direction]] = {
    **dict.fromkeys(_SHARES, ("", "higher")),
    **dict.fromkeys(_PERPLEXITIES, ("perplexity", "lower")),
    "mcc": ("coefficient", "higher"),
    "likelihood_diff": ("nats", "neither"),
    "pct_stereotype": ("", "neither"),
    "bits_per_byte": ("bits/byte", "lower"),
    "bleu": ("BLEU", "higher"),
    "chrf": ("chrF", "higher"),
    "ter": ("TER", "lower"),
    "items": ("items", "neither"),
}
"""Units and directions of lm-eval's metrics. Another metric has a score without a direction."""

PREFIX = "lm_eval_"


def describe_metric(match: re.Match[str]) -> Metric:
    """Return the metric of a name that the rule of ``metrics.toml`` matches."""
    name, served = match["name"], ", served" if match["served"] else ""
    metric = max((one for one in _UNITS if name.endswith(f"_{one}")), key=len, default=None)
    if metric is None:
        return Metric(f"lm-eval {name}{served}", "score")
    unit, better = _UNITS[metric]
    return Metric(f"lm-eval {name.removesuffix(f'_{metric}')} {metric}{served}", unit, better)
