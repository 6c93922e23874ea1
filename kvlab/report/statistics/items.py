"""Two systems on the same items: McNemar's test, and its form for items seen at several seeds.

At one seed the items that only one of the two gets right decide: McNemar's exact test. At
several seeds one item's outcomes belong together, so the item is the unit: its difference is
averaged over seeds, and the test is that of Durkalski and others (2003), which at one seed is
McNemar's chi-square. The error says how a fresh draw of *items* would move the difference; it
does not know how fresh *seeds* would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.report.statistics.distributions import coin_at_most, normal_beyond

NORMAL_95 = 1.959963984540054


@dataclass(frozen=True)
class ItemComparison:
    """B against A on shared items.

    Attributes:
        difference: share that B gets right minus share that A does.
        error: standard error of it over items.
        gained, lost: times that only B, only A was right, over all seeds.
        p: two-sided.
    """

    items: int
    seeds: int
    difference: float
    error: float
    gained: int
    lost: int
    p: float

    @property
    def interval(self) -> tuple[float, float]:
        half = NORMAL_95 * self.error
        return self.difference - half, self.difference + half


def compare_items(
    pairs: Sequence[tuple[Sequence[bool] | bytes, Sequence[bool] | bytes]],
) -> ItemComparison:
    """Compares outcomes of the same items, one ``(A, B)`` a seed, all in the same item order."""
    import numpy as np

    a = np.array([np.frombuffer(bytes(left), np.uint8) for left, _ in pairs], dtype=np.int64)
    b = np.array([np.frombuffer(bytes(right), np.uint8) for _, right in pairs], dtype=np.int64)
    seeds, items = a.shape
    gained, lost = int(((b == 1) & (a == 0)).sum()), int(((b == 0) & (a == 1)).sum())
    totals = (b - a).sum(axis=0)
    mean = float(totals.mean()) / seeds
    spread = float(totals.std(ddof=1)) / seeds if items > 1 else 0.0
    p = mcnemar(gained, lost) if seeds == 1 else _clustered(totals.tolist())
    return ItemComparison(items, seeds, mean, spread / items**0.5, gained, lost, p)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value: a fair coin for every item that only one side gets right."""
    total = gained + lost
    return min(1.0, 2 * coin_at_most(min(gained, lost), total)) if total else 1.0


def _clustered(totals: Sequence[int]) -> float:
    squares = sum(total * total for total in totals)
    return normal_beyond(sum(totals) / squares**0.5) if squares else 1.0
