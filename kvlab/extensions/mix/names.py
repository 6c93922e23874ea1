"""The metrics of the sources of a mix."""

import re

from kvlab.store.metrics import Metric


def describe_part(match: re.Match[str]) -> Metric:
    """Return the metric of a name such as ``loss_recall_served``."""
    source, served, tokens = match["source"].replace("_", "-"), match["served"], match["tokens"]
    how = "through the serving cache" if served else "one-shot"
    if tokens:
        return Metric(f"targets of {source}, {how}", "tokens")
    return Metric(f"loss of {source}, {how}", "nats/token", "lower")
