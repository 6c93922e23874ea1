"""Plan the tuning of a sweep: which rates each architecture is trained at, and what they give.

Everything follows from the record: the losses of the tuning trials that have ended say which rate
comes next, and which is the best. Rates are added in rounds, at most three of them, when all trials
of a round have ended.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.analysis.tuning import (
    MAX_ADDED,
    Optimum,
    TunedPoint,
    describe_optimum,
    find_optimum,
    propose_value,
    read_points,
    write_point,
)
from kvlab.errors import UsageError
from kvlab.humanize import format_count
from kvlab.spec import BenchmarkConfig, EvaluationConfig, ServingConfig
from kvlab.spec.experiment import Experiment
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.tuning_config import TUNED_KEY, TuneConfig, is_tuned, with_learning_rate
from kvlab.store import Store
from kvlab.sweep.planning.planner import Plan, PlannedTrial, plan
from kvlab.sweep.planning.texts import IdentifyDataset


@dataclass(frozen=True)
class Architecture:
    """Cells that take one rate, as they have one training or share it by `share`.

    Attributes:
        cells: In the order of the design.
        tuned_cell: The one that is trained at every rate.
        points: The rates so far, rising, with the losses of the trials that have ended.
        optimum: None while the rates are being tried.
    """

    cells: tuple[Cell, ...]
    tuned_cell: Cell
    points: tuple[TunedPoint, ...] = ()
    optimum: Optimum | None = None

    @property
    def label(self) -> str:
        return self.tuned_cell.label

    @property
    def rate(self) -> float:
        """The rate of its cells; that of the recipe if none was found."""
        value = self.optimum.value if self.optimum is not None else None
        return value or self.tuned_cell.experiment.training.learning_rate


@dataclass(frozen=True)
class Tuning:
    """How far the tuning of a sweep has come.

    Attributes:
        architectures: Every distinct training of the design, with its rates.
        plan: The tuning trials; ``plan.cells`` has the rate as a level.
        round: From 1; each later one has a rate that the one before asked for.
        is_over: Whether every architecture has an optimum.
        lines: What was decided since the round before, for people.
    """

    sweep: Sweep
    architectures: tuple[Architecture, ...]
    plan: Plan
    round: int
    is_over: bool
    lines: tuple[str, ...] = ()

    def tuned_cells(self) -> tuple[Cell, ...]:
        """Return the cells of the design, each with the rate of its architecture."""
        rates = {id(cell): one.rate for one in self.architectures for cell in one.cells}
        return tuple(
            replace(cell, experiment=with_learning_rate(cell.experiment, rates[id(cell)]))
            if is_tuned(cell)
            else cell
            for cell in self.sweep.cells()
        )

    def declare(self) -> dict[str, Any]:
        """Return what all rounds and the stages after them share."""
        assert self.sweep.tune is not None, "only a sweep with tune is tuned"
        cells = [
            [cell.levels, _recipe_key(cell.experiment), cell.experiment.serving.identity()]
            for cell in self.sweep.cells()
        ]
        digest = hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()
        return {**self.sweep.tune.model_dump(mode="json", by_alias=True), "cells": digest}

    def describe(self) -> dict[str, Any]:
        """Return the entry ``tuning`` of ``sweep.json``."""
        tune = self.sweep.tune
        assert tune is not None, "only a sweep with tune is tuned"
        return {
            "key": TUNED_KEY,
            "grid": list(tune.learning_rates),
            "seeds": list(tune.seeds),
            "tokens": tune.tokens,
            "is_over": self.is_over,
            "architectures": [_describe_architecture(one) for one in self.architectures],
            "cells": [
                {
                    "levels": dict(cell.levels),
                    "trials": {str(seed): trial for seed, trial in cell.trials.items()},
                }
                for cell in self.plan.cells
            ],
        }


def plan_tuning(
    sweep: Sweep,
    store: Store | None,
    *,
    identify: IdentifyDataset | None = None,
    provisional: bool = False,
) -> Tuning:
    """Return how far the tuning of a sweep has come, from the record alone.

    What ``sweep.json`` has decided for the same trials stays decided, also if one of them is gone
    or has another result now.

    Args:
        sweep: With `tune`.
        store: The record; None takes it as empty.
        identify: Returns the digest of a dataset's text; see `kvlab.sweep.plan`.
        provisional: Plan even if a dataset or a checkpoint is unavailable; see `kvlab.sweep.plan`.

    Raises:
        SpecError: A checkpoint to start from is unavailable.
        DataError: A dataset is unavailable, and ``provisional`` is not set.
        StoreError: A result is damaged.
    """
    planner = _TuningPlanner(sweep, store, identify, provisional)
    return planner.restore() or planner.advance()


def plan_most_tuning(
    sweep: Sweep,
    store: Store | None,
    *,
    identify: IdentifyDataset | None = None,
    provisional: bool = False,
) -> Tuning:
    """Return the tuning of a sweep with as many rates as there can be; see `plan_tuning`.

    The rates that would be added are not known. Those of the plan cost as much.
    """
    planner = _TuningPlanner(sweep, store, identify, provisional)
    tuning = planner.restore() or planner.advance()
    return tuning if tuning.is_over else planner.add_all_rates(tuning)


class _TuningPlanner:
    """Plan the rounds of a sweep's tuning."""

    def __init__(
        self,
        sweep: Sweep,
        store: Store | None,
        identify: IdentifyDataset | None,
        provisional: bool,
    ):
        assert sweep.tune is not None, "only a sweep with tune is tuned"
        self._sweep, self._store, self._tune = sweep, store, sweep.tune
        self._identify, self._provisional = identify, provisional
        self._architectures = _group_cells(sweep)

    def advance(self) -> Tuning:
        """Return the first round with a trial that has not ended, or the end of the last one."""
        rates = [self._tune.learning_rates] * len(self._architectures)
        lines: tuple[str, ...] = ()
        for number in range(1, MAX_ADDED + 2):
            planned = self._plan(rates)
            architectures = self._read_losses(planned, rates)
            if not all(one.has_ended for one in planned.trials):
                break
            proposals = [
                propose_value(one.points, len(self._tune.learning_rates)) for one in architectures
            ]
            if proposals == [None] * len(proposals):
                decided = tuple(
                    replace(one, optimum=find_optimum(one.points)) for one in architectures
                )
                lines = tuple(_describe_decisions(decided, len(self._tune.seeds)))
                return Tuning(self._sweep, decided, planned, number, True, lines)
            lines = tuple(_describe_proposals(architectures, proposals))
            rates = [
                own if new is None else tuple(sorted((*own, new)))
                for own, new in zip(rates, proposals, strict=True)
            ]
        return Tuning(self._sweep, architectures, planned, number, False, lines)

    def restore(self) -> Tuning | None:
        """Return the tuning as ``sweep.json`` has decided it; None if it has not, or another."""
        try:
            recorded = self._store.sweep(self._sweep.name)["tuning"] if self._store else {}
            if not recorded.get("is_over"):
                return None
            entries = [
                (read_points(entry), Optimum(**entry["optimum"]))
                for entry in recorded["architectures"]
            ]
        except (UsageError, KeyError, TypeError):
            return None
        if len(entries) != len(self._architectures):
            return None
        planned = self._plan([tuple(p.value for p in points) for points, _ in entries])
        architectures = tuple(
            replace(one, points=points, optimum=optimum)
            for one, (points, optimum) in zip(self._architectures, entries, strict=True)
        )
        rounds = max(len(points) for points, _ in entries) - len(self._tune.learning_rates) + 1
        tuning = Tuning(self._sweep, architectures, planned, rounds, True)
        return tuning if json.loads(json.dumps(tuning.describe())) == recorded else None

    def add_all_rates(self, tuning: Tuning) -> Tuning:
        """Return a tuning with rates above those of every architecture that may get more."""
        most = len(self._tune.learning_rates) + MAX_ADDED
        rates = []
        for one in tuning.architectures:
            own = [point.value for point in one.points]
            own += [own[-1] * 2.0 ** (n + 1) for n in range(most - len(own))]
            rates.append(own)
        return replace(tuning, plan=self._plan(rates), round=MAX_ADDED + 1)

    def _plan(self, rates: Sequence[Sequence[float]]) -> Plan:
        cells = [
            _make_tuning_cell(one.tuned_cell, rate, self._tune)
            for one, own in zip(self._architectures, rates, strict=True)
            for rate in own
        ]
        return plan(
            self._sweep,
            self._store,
            identify=self._identify,
            provisional=self._provisional,
            cells=cells,
        )

    def _read_losses(
        self, planned: Plan, rates: Sequence[Sequence[float]]
    ) -> tuple[Architecture, ...]:
        """Return the architectures with the losses of the trials that have ended."""
        trials = {one.trial.id: one for one in planned.trials}
        cells = iter(planned.cells)
        return tuple(
            replace(
                one,
                points=tuple(
                    TunedPoint(rate, self._losses(next(cells).trials, trials)) for rate in own
                ),
            )
            for one, own in zip(self._architectures, rates, strict=True)
        )

    def _losses(
        self, trial_ids: Mapping[int, str], trials: Mapping[str, PlannedTrial]
    ) -> dict[int, float]:
        losses = {}
        for seed, trial_id in trial_ids.items():
            if trials[trial_id].state == "diverged":
                losses[seed] = math.inf
            elif trials[trial_id].state == "done" and self._store is not None:
                result = self._store.result(trial_id)
                assert result is not None, "it is done"
                losses[seed] = float(result["measurements"]["loss"])
        return losses


def _group_cells(sweep: Sweep) -> tuple[Architecture, ...]:
    """Return the cells of a sweep by what is tuned once, in the order of the design."""
    assert sweep.tune is not None, "only a sweep with tune is tuned"
    groups: dict[str, list[Cell]] = {}
    tuned: dict[tuple[str, ...], Cell] = {}
    for cell in filter(is_tuned, sweep.cells()):
        own = tuple(level for f, level in cell.levels.items() if f not in sweep.tune.share)
        groups.setdefault(_recipe_key(tuned.setdefault(own, cell).experiment), []).append(cell)
    return tuple(Architecture(tuple(cells), cells[0]) for cells in groups.values())


def _recipe_key(experiment: Experiment) -> str:
    """Return a key of all that a training depends on but its seed and its text."""
    facts = [
        experiment.model.computation(),
        experiment.data.model_dump(mode="json"),
        experiment.training.computation(experiment.model),
        experiment.training.init_from,
    ]
    return json.dumps(facts, sort_keys=True)


def _make_tuning_cell(cell: Cell, rate: float, tune: TuneConfig) -> Cell:
    """Return a cell that trains at a rate and measures the one-shot loss, and little else."""
    scored = cell.experiment.evaluation
    evaluation = EvaluationConfig(
        loss_tokens=scored.loss_tokens, loss_bytes=scored.loss_bytes, served=False
    )
    experiment = with_learning_rate(cell.experiment, rate, tune.tokens).model_copy(
        update={
            "serving": ServingConfig(),
            "evaluation": evaluation,
            "benchmark": BenchmarkConfig(prompt_tokens=1, new_tokens=1, repeats=1),
        }
    )
    levels = {**cell.levels, TUNED_KEY: f"{rate:.12g}"}
    return Cell(levels, experiment, tune.seeds, cell.off)


def _describe_decisions(architectures: Sequence[Architecture], seeds: int) -> Iterator[str]:
    for one in architectures:
        assert one.optimum is not None, "the tuning is over"
        recipe = one.tuned_cell.experiment.training.learning_rate
        failed = sum(seeds - len(point.losses) for point in one.points)
        note = f"; {format_count(failed, 'tuning trial')} failed" if failed else ""
        yield f"{one.label}: {TUNED_KEY} = {describe_optimum(one.optimum, recipe)}{note}"


def _describe_proposals(
    architectures: Sequence[Architecture], proposals: Sequence[float | None]
) -> Iterator[str]:
    for one, rate in zip(architectures, proposals, strict=True):
        if rate is not None:
            values = [point.value for point in one.points]
            is_outside = not values[0] < rate < values[-1]
            why = "the best so far is at the edge" if is_outside else "beside a divergence"
            yield f"{one.label}: next {TUNED_KEY} = {rate:g}, as {why}"


def _describe_architecture(one: Architecture) -> dict[str, Any]:
    return {
        "levels": dict(one.tuned_cell.levels),
        "cells": [dict(cell.levels) for cell in one.cells],
        "recipe": one.tuned_cell.experiment.training.learning_rate,
        "points": [write_point(point) for point in one.points],
        "optimum": None if one.optimum is None else asdict(one.optimum),
    }
