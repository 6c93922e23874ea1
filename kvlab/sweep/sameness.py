"""Why two differently written cells compute the same."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.spec.experiment import Experiment

_REASONS = {
    "model.window": "a window of the block size or more is global attention",
    "model.attention_pattern": "the same layers are global and local",
    "model.kv_sharing": "the same layers own their K/V",
    "model.rope_theta": "nothing is rotated",
    "serving.tie": "the same cache slots",
    "serving.tie_rule": "nothing is tied",
    "evaluation.served_tokens": "as many tokens are scored",
    "evaluation.hellaswag": "the same items are scored",
}
"""Fields that can be written in several ways for one computation, the strongest reason first."""

_ELSEWHERE = "where and how often something is done, not what comes out"


def why_same(one: Experiment, other: Experiment) -> str:
    """One line: what differs in writing, and why that changes nothing."""
    found = dict(flat(one.model_dump(mode="json")))
    differ = [key for key, value in flat(other.model_dump(mode="json")) if found.get(key) != value]
    differ = [key for key in differ if key.split(".")[0] not in ("name", "description")]
    if not differ:
        return "the same values"
    reason = next((text for key, text in _REASONS.items() if key in differ), _ELSEWHERE)
    return f"{', '.join(differ)}: {reason}"


def flat(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Nested data as dotted keys with their values."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value
