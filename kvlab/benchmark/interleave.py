"""Variants measured in turns, until their times are known well enough.

All A and then all B would measure the machine's mood as much as the variants. Here every round
runs each of them once, in an order that turns around from round to round (A B, B A, ...), so
that neither a drift nor the place in the round favours one.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvlab.benchmark.noise import Noise, NoiseWatch
from kvlab.benchmark.samples import Samples

Key = TypeVar("Key", bound=Hashable)

Work = Callable[[], Mapping[str, list[float]]]
"""One turn of a variant: seconds of each of its series, as many in every turn."""


@dataclass(frozen=True)
class StopRule:
    """Rounds go on until every median is known to ``relative_error``, at least ``least`` of
    them, at most ``most``, and none is begun after ``seconds``.

    With ``least`` = ``most`` the number of rounds is fixed.
    """

    relative_error: float = 0.05
    least: int = 5
    most: int = 30
    seconds: float = 60.0


@dataclass(frozen=True)
class Timed(Generic[Key]):
    """What interleaved turns gave: samples by variant and series, and how quiet it was."""

    samples: dict[tuple[Key, str], Samples]
    noise: Noise


def interleave(
    works: Mapping[Key, Work], rule: StopRule, tick: Callable[[], None] = lambda: None
) -> Timed[Key]:
    """Runs every work once to warm up, then all of them in turns.

    Args:
        works: variant -> one turn of it.
        tick: called after every turn; what it raises ends the measurement.
    """
    for work in works.values():
        work()
        tick()
    rounds: dict[tuple[Key, str], list[list[float]]] = {}
    watch, began = NoiseWatch(), time.monotonic()
    count = 0
    while count < rule.most:
        order = list(works)[:: -1 if count % 2 else 1]
        for variant in order:
            for series, seconds in works[variant]().items():
                rounds.setdefault((variant, series), []).append(list(seconds))
            tick()
        count += 1
        if count >= rule.least and (
            time.monotonic() - began > rule.seconds or _known(rounds, rule.relative_error)
        ):
            break
    samples = {key: Samples.of(found) for key, found in rounds.items()}
    return Timed(samples, watch.noise())


def _known(rounds: Mapping[tuple[Key, str], list[list[float]]], wanted: float) -> bool:
    return all(Samples.of(found).relative_error <= wanted for found in rounds.values())
