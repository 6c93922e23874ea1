"""Plan the tuning of a sweep: which rates each architecture is trained at, and what they give.

Everything follows from the record: the losses of the tuning trials that have ended say which rate
comes next, and which is the best. Rates are added in rounds, at most three of them, when all trials
of a round have ended.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.analysis.sequential import has_taken_tests
from kvlab.errors import UsageError
from kvlab.extensions.tuning import config
from kvlab.extensions.tuning import optimum as tuning
from kvlab.extensions.tuning.optimum import Optimum, TunedPoint
from kvlab.humanize import format_count
from kvlab.spec import Experiment, ServingConfig
from kvlab.spec.benchmark_config import BenchmarkConfig
from kvlab.spec.evaluation_config import EvaluationConfig
from kvlab.spec.sweep import Cell
from kvlab.store import Store
from kvlab.sweep.driver.retry_policy import forget_failure
from kvlab.sweep.planning.planner import Plan, PlannedCell, Stage, SweepPlanner


@dataclass(frozen=True)
class Architecture:
    """Cells that take one rate, as they have one training or share it by `share`.

    Attributes:
        tuned_cell: The one that is trained at every rate.
        points: The rates so far, rising, with the losses of the trials that have ended.
        optimum: None while the rates are being tried.
    """

    cells: tuple[Cell, ...]
    tuned_cell: Cell
    points: tuple[TunedPoint, ...] = ()
    optimum: Optimum | None = None

    @property
    def recipe(self) -> float:
        """The rate of the recipe."""
        return self.tuned_cell.experiment.training.learning_rate

    def to_json(self) -> dict[str, Any]:
        levels, cells = dict(self.tuned_cell.levels), [dict(cell.levels) for cell in self.cells]
        points = [tuning.write_point(point) for point in self.points]
        facts = {"levels": levels, "cells": cells, "recipe": self.recipe, "points": points}
        return {**facts, "optimum": self.optimum and asdict(self.optimum)}

    @property
    def decision(self) -> str:
        """What was found, in words."""
        assert self.optimum is not None, "the tuning is over"
        found = tuning.describe_optimum(self.optimum, self.recipe)
        return f"{self.tuned_cell.label}: {config.TUNED_KEY} = {found}"


class TuningPlanner:
    """Plan the rounds of a sweep's tuning: a `kvlab.sweep.planning.stages.Preparation`.

    What ``sweep.json`` has decided for the same trials stays decided, also if one of them is gone
    or has another result now.

    Attributes:
        architectures: Every distinct training of the design, with its rates.
    """

    def __init__(self, planner: SweepPlanner):
        tune = config.TuneFields.of(planner.sweep).tune
        assert tune is not None, "only a sweep with tune is tuned"
        self._planner, self._sweep, self._store = planner, planner.sweep, planner.store
        self._tune: config.TuneConfig = tune
        groups, tuned = dict[str, list[Cell]](), dict[tuple[str, ...], Cell]()
        for cell in filter(config.is_tuned, self._sweep.cells()):
            own = tuple(level for f, level in cell.levels.items() if f not in self._tune.share)
            groups.setdefault(_recipe_key(tuned.setdefault(own, cell).experiment), []).append(cell)
        made = (Architecture(tuple(cells), cells[0]) for cells in groups.values())
        self.architectures = tuple(made)

    def plan(self) -> Stage:
        """Return the first round with a trial that has not ended, or the end of the last one.

        A round that is not over has the cells of the design, which have no trials yet.
        """
        return self._restore() or self._advance()

    def plan_most(self) -> Plan:
        """Plan as many rates as there can be, after `plan`.

        The rates that would be added are not known. Those of the plan cost as much.
        """
        most = len(self._tune.learning_rates) + tuning.MAX_ADDED
        rates = [[point.value for point in one.points] for one in self.architectures]
        for own in rates:
            own += [own[-1] * 2.0 ** (n + 1) for n in range(most - len(own))]
        return self._plan_rates(rates)

    def cells(self) -> tuple[Cell, ...]:
        """Return the cells of the design, each with the rate of its architecture, after `plan`."""
        tuned: dict[int, Cell] = {}
        for one in self.architectures:
            rate = (one.optimum.value if one.optimum else None) or one.recipe
            for cell in one.cells:
                experiment = config.with_learning_rate(cell.experiment, rate)
                tuned[id(cell)] = replace(cell, experiment=experiment)
        return tuple(tuned.get(id(cell), cell) for cell in self._sweep.cells())

    def _advance(self) -> Stage:
        rates = [self._tune.learning_rates] * len(self.architectures)
        lines: tuple[str, ...] = ()
        for number in range(1, tuning.MAX_ADDED + 2):
            planned = self._plan_rates(rates)
            self.architectures = self._read_losses(planned, rates)
            if not all(one.has_ended for one in planned.trials):
                break
            count = len(self._tune.learning_rates)
            proposals = [tuning.propose_value(one.points, count) for one in self.architectures]
            if proposals == [None] * len(proposals):
                self.architectures = tuple(
                    replace(one, optimum=tuning.find_optimum(one.points))
                    for one in self.architectures
                )
                lines = tuple(one.decision + self._count_failed(one) for one in self.architectures)
                return self._make_stage(planned, number, lines)
            new = list(zip(self.architectures, rates, proposals, strict=True))
            lines = tuple(_describe_proposal(one, rate) for one, _, rate in new if rate is not None)
            rates = [own if rate is None else tuple(sorted((*own, rate))) for _, own, rate in new]
        cells = tuple(PlannedCell(cell.levels, {}, cell.off) for cell in self._sweep.cells())
        stage = self._make_stage(planned, number, lines)
        return replace(stage, plan=replace(planned, cells=cells))

    def _count_failed(self, one: Architecture) -> str:
        failed = sum(len(self._tune.seeds) - len(point.losses) for point in one.points)
        return f"; {format_count(failed, 'tuning trial')} failed" if failed else ""

    def _restore(self) -> Stage | None:
        """Return the end of the tuning as ``sweep.json`` has it; None if it has not, or another."""
        recorded: Any = self._planner.read_record().get("tuning")
        untuned = self.architectures
        with contextlib.suppress(LookupError, TypeError, ValueError):  # of another sweep
            if not recorded["is_over"]:
                return None
            self.architectures = tuple(
                replace(one, points=tuning.read_points(entry), optimum=Optimum(**entry["optimum"]))
                for one, entry in zip(untuned, recorded["architectures"], strict=True)
            )
            rates = [[point.value for point in one.points] for one in self.architectures]
            rounds = max(map(len, rates)) - len(self._tune.learning_rates) + 1
            stage = self._make_stage(self._plan_rates(rates), rounds)
            if json.loads(json.dumps(stage.record["tuning"])) == recorded:
                return stage
        self.architectures = untuned
        return None

    def _make_stage(self, planned: Plan, number: int, lines: tuple[str, ...] = ()) -> Stage:
        """Return a round as a stage: what it shares with those after it, and what is recorded."""
        is_over = all(one.optimum is not None for one in self.architectures)
        cells = [
            [cell.levels, _recipe_key(cell.experiment), cell.experiment.serving.identity()]
            for cell in self._sweep.cells()
        ]
        digest = hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()
        declared = {**self._tune.model_dump(mode="json", by_alias=True), "cells": digest}
        record = {
            "key": config.TUNED_KEY,
            "grid": list(self._tune.learning_rates),
            "seeds": list(self._tune.seeds),
            "tokens": self._tune.tokens,
            "is_over": is_over,
            "architectures": [one.to_json() for one in self.architectures],
            "cells": [replace(cell, off=frozenset()).to_json() for cell in planned.cells],
        }
        found = tuple(f"Tuned for {one.decision}." for one in self.architectures if is_over)
        kept = {"tune": declared}, {"tuning": record}, lines, found, not is_over
        return Stage(planned, f"tuning {number}", number, False, *kept)

    @staticmethod
    def reopen(store: Store, sweep: str, others: Collection[str] | None = None) -> None:
        """Set the failures of tuning trials aside, and have the rates decided again.

        Not after claims were tested: the error holds for the rates that they had. Nor while a
        driver runs, which goes by the rates that were decided.
        """
        with contextlib.suppress(UsageError, KeyError):  # not submitted yet, or not tuned
            recorded = store.sweep(sweep)
            tuned = recorded["tuning"]
            trials = {trial for cell in tuned["cells"] for trial in cell["trials"].values()}
            failed = {trial for trial in trials if store.status(trial) == "failed"}
            again = failed if others is None else trials.intersection(others)
            is_final = has_taken_tests(recorded) or store.is_driven(sweep)
            if again and tuned["is_over"] and not is_final:
                for trial in sorted(again):
                    forget_failure(store, trial)
                stages = {**recorded["stages"], "number": 0}  # those that follow replace it
                tuned = {**tuned, "is_over": False}
                store.write_sweep({**recorded, "tuning": tuned, "stages": stages})

    def _plan_rates(self, rates: Sequence[Sequence[float]]) -> Plan:
        both = zip(self.architectures, rates, strict=True)
        pairs = [(one.tuned_cell, rate) for one, own in both for rate in own]
        return self._planner.plan([_make_tuning_cell(*pair, self._tune) for pair in pairs])

    def _read_losses(
        self, planned: Plan, rates: Sequence[Sequence[float]]
    ) -> tuple[Architecture, ...]:
        """Return the architectures with the losses of the trials that have ended."""
        states = {one.trial.id: one.state for one in planned.trials}

        def read(trials: Mapping[int, str]) -> dict[int, float]:
            losses = {seed: math.inf for seed, one in trials.items() if states[one] == "diverged"}
            for seed, trial in trials.items():
                if states[trial] == "done" and self._store is not None:
                    result = self._store.result(trial)
                    assert result is not None, "it is done"
                    losses[seed] = float(result["measurements"]["loss"])
            return dict(sorted(losses.items()))

        cells = iter(planned.cells)
        return tuple(
            replace(one, points=tuple(TunedPoint(rate, read(next(cells).trials)) for rate in own))
            for one, own in zip(self.architectures, rates, strict=True)
        )


def _recipe_key(experiment: Experiment) -> str:
    """Return a key of all that a training depends on but its seed and its text."""
    facts = [
        experiment.model.computation(),
        experiment.data.model_dump(mode="json"),
        experiment.training.identity_of(experiment.model),
        experiment.training.init_from,
    ]
    return json.dumps(facts, sort_keys=True)


def _make_tuning_cell(cell: Cell, rate: float, tune: config.TuneConfig) -> Cell:
    """Return a cell that trains at a rate and measures the one-shot loss, and little else."""
    scored = cell.experiment.evaluation  # defaults stay defaults, which the text may lower
    names = {"loss_tokens", "loss_bytes", "precision"} & scored.model_fields_set
    kept = {name: getattr(scored, name) for name in names}
    little = {
        "serving": ServingConfig(),
        "evaluation": EvaluationConfig.model_validate({**kept, "served": False}),
        "benchmark": BenchmarkConfig(prompt_tokens=1, new_tokens=1, repeats=1),
    }
    experiment = cell.experiment.model_copy(update=little)
    experiment = config.with_learning_rate(experiment, rate, tune.tokens)
    levels = {**cell.levels, config.TUNED_KEY: f"{rate:.12g}"}
    return Cell(levels, experiment, tune.seeds, cell.off)


def _describe_proposal(one: Architecture, rate: float) -> str:
    is_inside = one.points[0].value < rate < one.points[-1].value
    why = "beside a divergence" if is_inside else "the best so far is at the edge"
    return f"{one.tuned_cell.label}: next {config.TUNED_KEY} = {rate:g}, as {why}"
