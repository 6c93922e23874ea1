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
_NAME = re.compile(
    rf"{PREFIX}(?P<task>[a-z0-9_]+?)"
    rf"(?:_(?P<metric>{'|'.join(sorted(_UNITS, key=len, reverse=True))}))?"
    r"(?P<served>_served)?"
)


def describe_metric(match: re.Match[str]) -> Metric:
    """Return the metric of a name that the rule of ``metrics.toml`` matches."""
    found = _NAME.fullmatch(match[0])
    assert found is not None, "a rule of metrics.toml"
    unit, better = _UNITS.get(found["metric"] or "", ("score", "neither"))
    title = " ".join(filter(None, ["lm-eval", found["task"], found["metric"]]))
    return Metric(f"{title}, served" if found["served"] else title, unit, better)
