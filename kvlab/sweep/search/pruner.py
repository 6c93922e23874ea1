"""Which trainings of a search go on at a rung. See `kvlab.spec.pruning_config` for the rules.

All of it follows from the history, in the order in which it was made: no clock, no chance.
Trials that share a training stand at a rung once.
"""

from collections.abc import Sequence
from statistics import median

from kvlab.spec.pruning_config import PruningConfig
from kvlab.sweep.search.search_history import Suggestion


class Pruner:
    """Reads the points of a search, and changes none.

    Args:
        config: of the search; None if nothing is pruned: then there are no rungs.
        points: the search's own list, which grows.
    """

    def __init__(self, config: PruningConfig | None, points: Sequence[Suggestion]):
        self._config, self._points = config, points

    def until(self, point: Suggestion) -> int | None:
        """After which step its training is to pause, or has if it is pruned; None at the end."""
        if self._config is None or point.kept:
            return None
        at = self._config.steps(point.steps)
        number = len(point.past.rungs) - (point.past.state == "pruned")
        return at[number] if number < len(at) else None

    def goes_on(self, point: Suggestion) -> bool:
        """Whether one that has just reached a rung goes on at once."""
        assert self._config is not None, "only trainings with rungs reach one"
        if point.kept:
            return True
        rung = len(point.past.rungs) - 1
        losses = self._losses(rung)
        if self._config.rule == "halving":
            return point.training in self._best(losses, 0)
        others = [loss for training, loss in losses.items() if training != point.training]
        assert self._config.startup is not None, "filled in"
        return len(others) < self._config.startup or point.past.rungs[rung] <= median(others)

    def promotable(self, *, at_end: bool) -> Suggestion | None:
        """One that waits and for which there is room by now, the furthest first.

        Args:
            at_end: no more suggestions come, so the best of every rung goes on at least.
        """
        if self._config is None or self._config.rule != "halving":
            return None
        for rung in range(self._highest(), -1, -1):
            for training in self._best(self._losses(rung), int(at_end)):
                for point in self._waiting(rung):
                    if point.training == training:
                        return point
        return None

    def furthest(self) -> Suggestion | None:
        """The best of those that wait at the highest rung, unless a trial has been measured: a
        search whose budget is spent still ends with an answer."""
        if any(point.past.values for point in self._points):
            return None
        for rung in range(self._highest(), -1, -1):
            waiting = self._waiting(rung)
            if waiting:
                return min(waiting, key=lambda point: point.past.rungs[rung])
        return None

    def flops(self) -> float:
        """Training FLOPs that were spent, or are going to be by what is in flight.

        A training counts once, as far as it went. One that failed or diverged counts up to where
        it was to pause, or whole: how far it came is not known.
        """
        spent: dict[str, float] = {}
        for point in self._points:
            if point.trained:
                until = None if point.past.values else self.until(point)
                share = 1.0 if until is None else until / point.steps
                spent[point.training] = max(spent.get(point.training, 0.0), share * point.flops)
        return sum(spent.values())

    def _highest(self) -> int:
        return max((len(point.past.rungs) for point in self._points), default=0) - 1

    def _losses(self, rung: int) -> dict[str, float]:
        """Training -> its loss at a rung, in the order in which they were suggested."""
        return {
            point.training: point.past.rungs[rung]
            for point in self._points
            if point.trained and len(point.past.rungs) > rung
        }

    def _best(self, losses: dict[str, float], least: int) -> list[str]:
        """As many as there is room for above a rung; of equal ones the earlier (sort is stable)."""
        assert self._config is not None
        assert self._config.factor is not None, "filled in"
        room = max(least, len(losses) // self._config.factor)
        return sorted(losses, key=losses.__getitem__)[:room]

    def _waiting(self, rung: int) -> list[Suggestion]:
        return [
            point
            for point in self._points
            if point.trained and point.past.state == "pruned" and len(point.past.rungs) == rung + 1
        ]
