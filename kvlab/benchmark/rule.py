"""When a time, and a comparison of two, is known well enough. Imports nothing: options read it."""

from dataclasses import dataclass

RESOLVED = 0.02
"""A ratio whose 99% interval reaches no further than this to either side is settled: then equal
variants are called the same, and a difference of 5% is found in nearly every case."""


@dataclass(frozen=True)
class StopRule:
    """Rounds go on until every median is known to ``relative_error`` and every comparison with
    the first variant is settled, at least ``least`` of them, at most ``most``, and none is begun
    after ``seconds``.

    With ``least`` = ``most`` the number of rounds is fixed.
    """

    relative_error: float = 0.05
    least: int = 5
    most: int = 200
    seconds: float = 120.0
