"""Prune the trainings of a search at rungs; see `kvlab.spec.search_config` for the rules.

Successive halving is asynchronous: algorithm 2 of Li et al. (2020), "A System for Massively
Parallel Hyperparameter Tuning". The median rule is that of Optuna's ``MedianPruner``.

All decisions follow from the history in the order in which it was made, not from a clock or from
chance. Trials that share a training count once at a rung.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from kvlab.errors import RecordDamaged
from kvlab.extensions.search.history import Suggestion, load_history
from kvlab.spec.search_config import PruningConfig
from kvlab.store import Store
from kvlab.sweep.planning.planner import Plan


class Pruner:
    """Decide which trainings go on at a rung. It reads the suggestions, and changes none."""

    def __init__(self, config: PruningConfig | None, suggestions: Sequence[Suggestion]):
        self._config, self._suggestions = config, suggestions

    def pause_step(self, suggestion: Suggestion) -> int | None:
        """Return after which step a training pauses, or has paused if it is pruned."""
        if self._config is None or suggestion.is_promoted:
            return None
        steps = self._config.steps(suggestion.steps)
        rung = len(suggestion.observation.rung_losses) - suggestion.is_pruned
        return steps[rung] if rung < len(steps) else None

    def should_continue(self, suggestion: Suggestion) -> bool:
        """Return whether a training that has just reached a rung goes on at once."""
        assert self._config is not None, "only trainings with rungs reach one"
        if suggestion.is_promoted:
            return True
        losses = self._losses_at(len(suggestion.observation.rung_losses) - 1)
        if self._config.rule == "halving":
            return suggestion.training_id in self._best_of(losses, 0)
        own = losses.pop(suggestion.training_id)
        assert self._config.startup is not None, "filled in"
        return len(losses) < self._config.startup or own <= median(losses.values())

    def find_promotable(self, *, is_last: bool) -> Suggestion | None:
        """Return a pruned suggestion that has room above its rung by now, the furthest first.

        Args:
            is_last: No more suggestions come, so at least the best of every rung goes on.
        """
        if self._config is None or self._config.rule != "halving":
            return None
        by_rung = defaultdict[int, dict[str, Suggestion]](dict)
        for one in self._pruned():
            rung = len(one.observation.rung_losses) - 1
            by_rung[rung].setdefault(one.training_id, one)
        for rung in sorted(by_rung, reverse=True):
            for training_id in self._best_of(self._losses_at(rung), int(is_last)):
                if training_id in by_rung[rung]:
                    return by_rung[rung][training_id]
        return None

    def find_furthest(self) -> Suggestion | None:
        """Return the best of those pruned at the highest rung, unless a trial has been measured.

        With it a search whose budget is spent still ends with an answer.
        """
        if any(suggestion.observation.values for suggestion in self._suggestions):
            return None
        paths = [(one.observation.rung_losses, one) for one in self._pruned()]
        return min(paths, key=lambda p: (-len(p[0]), p[0][-1]))[1] if paths else None

    def spent_flops(self) -> float:
        """Return the training FLOPs spent so far, with those of what runs now.

        A training counts once, as far as it went. One that failed or diverged counts up to where
        it was to pause, since how far it came is unknown.
        """
        spent: dict[str, float] = {}
        for suggestion in self._suggestions:
            if suggestion.has_trial:
                is_measured = bool(suggestion.observation.values)
                step = None if is_measured else self.pause_step(suggestion)
                fraction = 1.0 if step is None else step / suggestion.steps
                flops = fraction * suggestion.flops
                spent[suggestion.training_id] = max(spent.get(suggestion.training_id, 0.0), flops)
        return sum(spent.values())

    def _losses_at(self, rung: int) -> dict[str, float]:
        """Return the loss at a rung by training, in the order of the suggestions."""
        return {
            suggestion.training_id: suggestion.observation.rung_losses[rung]
            for suggestion in self._suggestions
            if suggestion.has_trial and len(suggestion.observation.rung_losses) > rung
        }

    def _best_of(self, losses: dict[str, float], minimum: int) -> list[str]:
        """Return as many trainings as there is room for above a rung; of equals, the earlier."""
        assert self._config is not None
        assert self._config.factor is not None, "filled in"
        room = max(minimum, len(losses) // self._config.factor)
        return sorted(losses, key=losses.__getitem__)[:room]  # the sort is stable

    def _pruned(self) -> list[Suggestion]:
        return [one for one in self._suggestions if one.has_trial and one.is_pruned]


def count_remaining_suggestions(plan: Plan, store: Store | None) -> int:
    """Return how many trials a search may still suggest, with those that have not ended.

    There are at most as many as the budgets of trials and FLOPs allow. A budget of hours alone says
    nothing about their number; then none is counted.

    Returns:
        0 for a sweep without a search.

    Raises:
        StoreError: The history is of another search.
    """
    config = plan.sweep.search
    if config is None:
        return 0
    suggestions, name = list[Suggestion](), plan.sweep.name
    if store is not None:
        points = store.search_points(name)
        with contextlib.suppress(RecordDamaged):  # a submit makes it again
            suggestions, _ = load_history(store.sweep_directory(name), points, config)
    trained = [suggestion for suggestion in suggestions if suggestion.has_trial]
    allowed = []
    if config.trials is not None:
        allowed.append(config.trials - len(trained))
    if config.flops is not None:  # the suggestion that exceeds the budget is still trained
        spent = Pruner(config.pruning, suggestions).spent_flops()
        allowed.append(math.ceil((config.flops - spent) / max(1, plan.trials[0].flops)))
    unfinished = sum(suggestion.is_open for suggestion in trained)
    return max(0, min(allowed, default=0)) + unfinished
