"""Holm's correction, of statsmodels."""

from collections.abc import Sequence


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return corrected p-values, in the order of the input."""
    from statsmodels.stats.multitest import multipletests

    return multipletests(p_values, method="holm")[1].tolist() if len(p_values) else []
