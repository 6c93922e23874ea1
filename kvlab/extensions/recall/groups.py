"""Groups of questions, by number of pairs and by distance, and the names of their metrics."""

import re

from kvlab.store.metrics import Metric

_NAME = re.compile(r"recall_(?P<number>[0-9]+)_(?P<by>pairs|back)(?P<kind>_served|_items)?")


def describe_group(match: re.Match[str]) -> Metric:
    """Return the metric of a name such as ``recall_16_back_served``."""
    found = _NAME.fullmatch(match[0])
    assert found is not None, "a rule of metrics.toml"
    number, kind = int(found["number"]), found["kind"]
    which = f"of {number} pairs"
    if found["by"] == "back":
        which = f"{number // 2 + 1} to {number} tokens back" if number > 2 else f"{number} back"
    if kind == "_items":
        return Metric(f"answers {which}", "items")
    title = f"recall {which}"
    items = f"recall_{number}_{found['by']}_items"
    return Metric(f"{title}, served" if kind else title, "", "higher", items=items)
