"""Holm's step-down correction for several tests (Holm 1979)."""

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected p-values, in the order given: at level a, at most a chance of any false call."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
