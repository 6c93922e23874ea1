"""What the benchmarks share: works that are timed in turn, and the error of a missed limit."""

import time
from collections.abc import Callable, Mapping


class LimitMissed(Exception):
    """A figure is outside its limit; the message names both.

    Raise it after the last line, so that all measurements are printed.
    """


def time_in_turn(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Return the seconds of each work in every round, A B ... A B ..., after one of warm-up.

    Processor time, the default, is disturbed little by what else the machine does.

    Args:
        repeats: Calls of a work in a round; the seconds are of one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            began = clock()
            for _ in range(repeats):
                work()
            if number:
                seconds[name].append((clock() - began) / repeats)
    return seconds
