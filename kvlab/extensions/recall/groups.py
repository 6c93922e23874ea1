"""Groups of questions, by number of pairs and by distance, and the names of their metrics."""

import re

from kvlab.store.metrics import Metric


def describe_group(match: re.Match[str]) -> Metric:
    """Return the metric of a name such as ``recall_16_back_served``."""
    number, by, kind = int(match["number"]), match["by"], match["kind"]
    which = f"of {number} pairs"
    if by == "back":
        which = f"{number // 2 + 1} to {number} tokens back" if number > 2 else f"{number} back"
    if kind == "_items":
        return Metric(f"answers {which}", "items")
    title = f"recall {which}{', served' if kind else ''}"
    return Metric(title, "", "higher", items=f"recall_{number}_{by}_items")
