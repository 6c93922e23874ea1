"""Holm's correction, small enough to be called in every simulated sweep."""

from collections.abc import Sequence


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return corrected p-values, in the order of the input (Holm 1979)."""
    count, corrected, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
