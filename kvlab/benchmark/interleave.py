"""Variants measured in turns, until their times are known well enough.

All A and then all B would measure the machine's mood as much as the variants. Here every round
runs each of them once, in an order that turns around from round to round (A B, B A, ...), so
that neither a drift nor the place in the round favours one.
"""

import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvlab.benchmark.noise import Noise, NoiseWatch
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.rule import StopRule
from kvlab.benchmark.samples import Samples, compare

Key = TypeVar("Key", bound=Hashable)

Work = Callable[[], Mapping[str, list[float]]]
"""One turn of a variant: seconds of each of its series, as many in every turn."""


LOOK_AGAIN = 1.1
"""Intervals are looked at when there are this many times the rounds of the last look: they take
time to compute, and a rule that looks rarely is rarely fooled by chance."""


@dataclass(frozen=True)
class Timed(Generic[Key]):
    """What interleaved turns gave: samples by variant and series, and how quiet it was."""

    samples: dict[tuple[Key, str], Samples]
    noise: Noise

    @property
    def rounds(self) -> int:
        """Of every series."""
        return len(next(iter(self.samples.values())).rounds)


Rounds = dict[tuple[Key, str], list[list[float]]]


def interleave(
    works: Mapping[Key, Work],
    rule: StopRule,
    tick: Callable[[], None] = lambda: None,
    compared: Collection[str] | None = None,
    nvml: Nvml | None = None,
) -> Timed[Key]:
    """Runs every work once to warm up, then all of them in turns.

    Args:
        works: variant -> one turn of it. The others are compared with the first.
        tick: called after every turn; what it raises ends the measurement.
        compared: the series whose comparisons must be settled; None: all.
        nvml: the GPU on which it runs, to see whether others use it.
    """
    for work in works.values():
        work()
        tick()
    rounds: Rounds[Key] = {}
    watch, began = NoiseWatch(nvml), time.monotonic()
    count, look = 0, rule.least
    while count < rule.most:
        order = list(works)[:: -1 if count % 2 else 1]
        for variant in order:
            for series, seconds in works[variant]().items():
                rounds.setdefault((variant, series), []).append(list(seconds))
            tick()
        count += 1
        if count < rule.least:
            continue
        if time.monotonic() - began > rule.seconds:
            break
        if count >= look:
            look = math.ceil(count * LOOK_AGAIN)
            if _settled(rounds, list(works), compared) and _known(rounds, rule.relative_error):
                break
    samples = {key: Samples.of(found) for key, found in rounds.items()}
    return Timed(samples, watch.noise())


def _settled(rounds: Rounds[Key], works: list[Key], compared: Collection[str] | None) -> bool:
    """Whether each variant is known to differ, or not to, from the first."""
    base = works[0]
    for (variant, series), found in rounds.items():
        if variant != base and (compared is None or series in compared):
            comparison = compare(Samples.of(found), Samples.of(rounds[base, series]))
            if comparison is None or not comparison.settled:
                return False
    return True


def _known(rounds: Rounds[Key], wanted: float) -> bool:
    return all(Samples.of(found).relative_error <= wanted for found in rounds.values())
