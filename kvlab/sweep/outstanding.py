"""What a plan still has to run: its trials that have not ended, and what its search may suggest."""

import math
from collections.abc import Iterator
from dataclasses import replace

from kvlab.sweep.history import load_history
from kvlab.sweep.plan import Plan, PlannedTrial
from kvlab.sweep.point import Point
from kvlab.trial.record import Store


def outstanding(plan: Plan, store: Store | None) -> tuple[list[PlannedTrial], int]:
    """The trials still to run, and how many of them are suggestions that nobody has made yet.

    A suggestion is taken to cost what the base experiment does: it is not known before it is
    made. There are at most as many as the budgets of trials and FLOPs allow; a budget of hours
    alone says nothing about their number, and then none is counted.

    Raises:
        StoreError: the history of the search is damaged, or another search's.
    """
    missing = [planned for planned in plan.trials if not planned.ended]
    if plan.sweep.search is None:
        return missing, 0
    suggested = list(_suggestions(plan, store))
    return missing + suggested, len(suggested)


def _suggestions(plan: Plan, store: Store | None) -> Iterator[PlannedTrial]:
    config, base = plan.sweep.search, replace(plan.trials[0], state="new")
    assert config is not None, "asked for by `outstanding`"
    points: list[Point] = []
    if store is not None:
        points, _ = load_history(store.sweep_directory(plan.sweep.name) / "search.json", config)
    trained = [point for point in points if point.trained]
    left = []
    if config.trials is not None:
        left.append(config.trials - len(trained))
    if config.flops is not None:  # the one that passes the budget is still trained
        spent = sum(point.flops for point in trained)
        left.append(math.ceil((config.flops - spent) / max(1, base.flops)))
    unended = sum(point.past.state == "open" for point in trained)
    for _ in range(max(0, min(left, default=0)) + unended):
        yield base
