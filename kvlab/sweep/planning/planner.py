"""`plan`: a sweep as trials, checked, costed and de-duplicated. Never imports torch."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvlab.errors import DataError
from kvlab.humanize import format_count
from kvlab.layout import KVLayout, parameter_count, training_flops
from kvlab.spec import DataConfig
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.spec.init_from import CellKey, cell_key
from kvlab.spec.sweep import Cell, Sweep
from kvlab.store import Store
from kvlab.trial.initial_weights import InitialWeightsResolver
from kvlab.trial.trial import Trial

TrialState = Literal["new", "shares training", "done", "failed", "diverged", "pruned"]

IdentifyDataset = Callable[[DataConfig], str]


@dataclass(frozen=True)
class PlannedTrial:
    """One trial that the sweep needs, and what is known before it runs.

    Attributes:
        cells: the levels of every cell that it answers: several, if they compute the same.
        state: how it stands in the store; ``shares training`` is new but needs no training of
            its own.
        shares_with: the earlier trial of this plan that has the same training, if any.
        starts_from: the first trial of this plan whose training its own starts from, if any.
        kv_bytes_per_token: in all cache slots together.
        kv_bytes: of one sequence at the block size.
        flops: of its training, whoever runs it.
    """

    trial: Trial
    cells: tuple[Mapping[str, str], ...]
    state: TrialState
    shares_with: str | None
    starts_from: str | None
    parameters: int
    kv_bytes_per_token: int
    kv_bytes: int
    flops: int
    tokens: int

    @property
    def levels(self) -> Mapping[str, str]:
        return self.cells[0]

    @property
    def label(self) -> str:
        return " ".join(f"{factor}={level}" for factor, level in self.levels.items())

    @property
    def trains(self) -> bool:
        """Whether running it means training."""
        return self.state == "new"

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "diverged", "pruned")


@dataclass(frozen=True)
class PlannedCell:
    """One combination of levels, and the trial that answers it at every seed.

    ``off`` names the factors that do not apply in it.
    """

    levels: Mapping[str, str]
    trials: Mapping[int, str]
    off: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """What a sweep will run, the baseline first.

    Attributes:
        trials: every trial once, cell by cell, seed by seed.
        cells: every cell of the design, also those whose trials another cell has too.
        absent: why a text or a checkpoint is not there, one line each. Then the ids are
            provisional: they change once it can be identified.
    """

    sweep: Sweep
    trials: tuple[PlannedTrial, ...]
    cells: tuple[PlannedCell, ...] = field(repr=False)
    absent: tuple[str, ...] = ()

    @cached_property
    def trainings(self) -> int:
        """Distinct trainings behind the trials."""
        return len({planned.trial.training_id for planned in self.trials})

    @property
    def flops(self) -> int:
        """Training FLOPs that are still to be spent."""
        return sum(planned.flops for planned in self.trials if planned.trains)

    @property
    def tokens(self) -> int:
        """Training tokens that are still to be seen."""
        return sum(planned.tokens for planned in self.trials if planned.trains)

    def counts(self) -> dict[TrialState, int]:
        """Trials in every state that occurs."""
        found: dict[TrialState, int] = {}
        for planned in self.trials:
            found[planned.state] = found.get(planned.state, 0) + 1
        return found

    def totals(self) -> str:
        """``36 trials, 24 trainings: 12 trials share a training with another``."""
        trials, sharing = len(self.trials), len(self.trials) - self.trainings
        text = f"{format_count(trials, 'trial')}, {format_count(self.trainings, 'training')}"
        if sharing:
            verb = "trial shares" if sharing == 1 else "trials share"
            text += f": {sharing:,} {verb} a training with another"
        return text


def plan(
    sweep: Sweep,
    store: Store | str | Path | None = None,
    *,
    identify: IdentifyDataset | None = None,
    provisional: bool = False,
    cells: Sequence[Cell] | None = None,
) -> Plan:
    """The trials of every cell and seed of ``sweep``.

    Args:
        sweep: from `kvlab.spec.load_sweep`.
        store: where finished trials are looked up; None takes all as new.
        identify: digest of the text of a data section; default `kvlab.data.identity`.
        provisional: plan also without the text or a checkpoint, as before a download; see
            ``Plan.absent``.
        cells: plan these instead of the sweep's own.

    Raises:
        SpecError: a cell is not possible, or a checkpoint to start from cannot be had.
        DataError: the text is not there, and ``provisional`` is not set.
    """
    record = Store(store) if isinstance(store, str | Path) else store
    every = sweep.cells() if cells is None else cells
    starts = InitialWeightsResolver(sweep, every, provisional=provisional)
    builder = _PlanBuilder(
        record, identify or _dataset_id, provisional, starts, uses_pruning(sweep)
    )
    planned = tuple(builder.add(cell) for cell in every)
    return Plan(sweep, builder.trials(), planned, (*builder.absent, *starts.absent))


def uses_pruning(sweep: Sweep) -> bool:
    """Whether a pruned trial counts as ended in this sweep."""
    return sweep.search is not None and sweep.search.pruning is not None


def trials_to_run(plan: Plan, retry_failed: bool = False) -> list[PlannedTrial]:
    """The trials of a plan that have not ended; with ``retry_failed`` the failed ones too."""
    return [p for p in plan.trials if not p.ended or (retry_failed and p.state == "failed")]


class _PlanBuilder:
    """Collects trials by id; several cells may compute the same."""

    def __init__(
        self,
        store: Store | None,
        identify: IdentifyDataset,
        provisional: bool,
        starts: InitialWeightsResolver,
        pruned: bool,
    ):
        self._store, self._identify, self._provisional = store, identify, provisional
        self._starts, self._pruned = starts, pruned
        self.absent: list[str] = []
        self._identities: dict[DataConfig, str] = {}
        self._made: dict[tuple[CellKey, int], Trial] = {}
        self._trials: dict[str, Trial] = {}
        self._cells: dict[str, list[Mapping[str, str]]] = {}
        self._facts: dict[str, dict[str, int]] = {}

    def add(self, cell: Cell) -> PlannedCell:
        facts = _trial_costs(cell.experiment)
        ids = {}
        for seed in cell.seeds:
            trial = self._trial(cell, seed)
            ids[seed] = trial.id
            self._trials.setdefault(trial.id, trial)
            self._cells.setdefault(trial.id, []).append(cell.levels)
            self._facts.setdefault(trial.id, facts)
        return PlannedCell(cell.levels, ids, cell.off)

    def trials(self) -> tuple[PlannedTrial, ...]:
        first: dict[str, str] = {}
        trained: set[str] = set()
        planned = []
        by_training = {t.training_id: t.id for t in reversed(self._trials.values())}
        for trial in self._trials.values():
            leader = first.setdefault(trial.training_id, trial.id)
            state = self._ended(trial)
            if state is None:
                state = "shares training" if self._is_trained(trial, trained) else "new"
                trained.add(trial.training_id)
            planned.append(
                PlannedTrial(
                    trial=trial,
                    cells=tuple(self._cells[trial.id]),
                    state=state,
                    shares_with=None if leader == trial.id else leader,
                    starts_from=by_training[trial.source_training.training_id]
                    if trial.source_training
                    else None,
                    **self._facts[trial.id],
                )
            )
        return tuple(planned)

    def _trial(self, cell: Cell, seed: int) -> Trial:
        key = (cell_key(cell.levels), seed)
        if key not in self._made:
            experiment = _with_absolute_paths(cell.experiment)
            data = experiment.data
            if data not in self._identities:
                self._identities[data] = self._identity(data)
            start = self._starts.resolve(cell, seed, self._trial)
            self._made[key] = Trial.of(experiment, self._identities[data], seed, start)
        return self._made[key]

    def _identity(self, data: DataConfig) -> str:
        try:
            return self._identify(data)
        except DataError as error:
            if not self._provisional:
                raise
            self.absent.append(str(error))
            return f"absent {data.source}"

    def _ended(self, trial: Trial) -> TrialState | None:
        return ended_status(self._store, trial.id, pruned=self._pruned) if self._store else None

    def _is_trained(self, trial: Trial, planned: set[str]) -> bool:
        """Whether the weights are there, or an earlier trial of this plan makes them."""
        if trial.training_id in planned:
            return True
        return self._store is not None and self._store.is_trained(trial.training_id)


def _dataset_id(data: DataConfig) -> str:
    from kvlab.data import dataset_identity

    return dataset_identity(data)


def _trial_costs(experiment: Experiment) -> dict[str, int]:
    layout = KVLayout.of(experiment.model, experiment.serving)
    training = experiment.training
    return {
        "parameters": parameter_count(experiment.model),
        "kv_bytes_per_token": layout.bytes_per_token(MODEL_DTYPE),
        "kv_bytes": layout.stored_bytes(1, experiment.model.block_size, MODEL_DTYPE),
        "flops": training_flops(experiment),
        "tokens": training.steps * training.batch_tokens,
    }


def _with_absolute_paths(experiment: Experiment) -> Experiment:
    """Text paths as any worker finds them, whatever its working folder."""
    data = experiment.data
    if not data.paths:
        return experiment
    paths = tuple(os.path.abspath(path) for path in data.paths)
    return experiment.model_copy(update={"data": data.model_copy(update={"paths": paths})})


# How a trial stands in the record, as a driver sees it.


EndedStatus = Literal["done", "failed", "diverged", "pruned"]


def ended_status(store: Store, trial_id: str, *, pruned: bool = False) -> EndedStatus | None:
    """How a trial ended; None if it has not, or its result cannot be read and is made again.

    Args:
        pruned: whether one that a search has pruned counts as ended, as it does for searches
            that prune; every other sweep needs its result.
    """
    status = store.status(trial_id)
    if status == "damaged" or (status == "pruned" and not pruned):
        return None
    return status


def ended_statuses(
    store: Store, trials: Iterable[str], forget_failures: bool, *, pruned: bool = False
) -> dict[str, EndedStatus | None]:
    """How all of them stand, see `ended_status`; failures are forgotten first, if so asked."""
    found = {trial: ended_status(store, trial, pruned=pruned) for trial in trials}
    if forget_failures:
        failed = [trial for trial, status in found.items() if status == "failed"]
        found.update((trial, forget_failure(store, trial)) for trial in failed)
    return found


def forget_failure(store: Store, trial_id: str) -> EndedStatus | None:
    """Makes a failed trial missing again, unless some other process has taken it."""
    with store.trial_lock(trial_id).hold(timeout=1.0) as ours:
        if ours and store.status(trial_id) == "failed":
            store.archive_result(trial_id)
    return ended_status(store, trial_id)


# `sweep.json`: what was asked, frozen as it was submitted, and which trials answer it.


def describe_sweep(plan: Plan, *, yaml: str, experiment_yaml: str, command: str) -> dict[str, Any]:
    """The record of one sweep.

    Args:
        plan: of the sweep.
        yaml: text of the sweep's file.
        experiment_yaml: text of the base experiment's file.
        command: as typed, without absolute paths.
    """
    sweep = plan.sweep
    order = {
        factor: [sweep.baseline[factor], *(n for n in levels if n != sweep.baseline[factor])]
        for factor, levels in sweep.factors.items()
    }
    return {
        "name": sweep.name,
        "question": sweep.question,
        "factors": order,
        "patches": sweep.model_dump(mode="json")["factors"],
        "baseline": dict(sweep.baseline),
        "design": " + ".join(sweep.design_seeds),
        "designed": sweep.selection.designed,
        "rules": [str(rule) for rule in sweep.selection.rules],
        "notes": list(sweep.selection.notes),
        "seeds": list(sweep.all_seeds),
        "report": sweep.report.model_dump(mode="json"),
        "cells": [
            {
                "levels": dict(cell.levels),
                "trials": {str(seed): trial for seed, trial in cell.trials.items()},
                **({"off": sorted(cell.off)} if cell.off else {}),
            }
            for cell in plan.cells
        ],
        "yaml": yaml,
        "yaml_sha256": hashlib.sha256(yaml.encode()).hexdigest(),
        "experiment_yaml": experiment_yaml,
        "command": command,
    }
