"""`plan`: a sweep as trials, checked, costed and de-duplicated. Never imports torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvlab.errors import DataError
from kvlab.layout import KVLayout, parameter_count, training_flops
from kvlab.spec.experiment import Experiment
from kvlab.spec.parts import DataConfig
from kvlab.spec.starts import CellKey, cell_key
from kvlab.spec.sweep import Cell, Sweep
from kvlab.sweep.recorded import ended_status
from kvlab.sweep.starts import Starts
from kvlab.trial.fingerprint import MODEL_DTYPE
from kvlab.trial.record import Store
from kvlab.trial.trial import Trial

State = Literal["new", "shares training", "done", "failed", "diverged", "pruned"]

Identify = Callable[[DataConfig], str]


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
    state: State
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

    def counts(self) -> dict[State, int]:
        """Trials in every state that occurs."""
        found: dict[State, int] = {}
        for planned in self.trials:
            found[planned.state] = found.get(planned.state, 0) + 1
        return found

    def totals(self) -> str:
        """``36 trials, 24 trainings: 12 trials share a training with another``."""
        trials, sharing = len(self.trials), len(self.trials) - self.trainings
        text = f"{_count(trials, 'trial')}, {_count(self.trainings, 'training')}"
        if sharing:
            verb = "trial shares" if sharing == 1 else "trials share"
            text += f": {sharing:,} {verb} a training with another"
        return text


def plan(
    sweep: Sweep,
    store: Store | str | Path | None = None,
    *,
    identify: Identify | None = None,
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
    starts = Starts(sweep, every, provisional=provisional)
    builder = _Builder(record, identify or _identity, provisional, starts, prunes(sweep))
    planned = tuple(builder.add(cell) for cell in every)
    return Plan(sweep, builder.trials(), planned, (*builder.absent, *starts.absent))


def prunes(sweep: Sweep) -> bool:
    """Whether a pruned trial counts as ended in this sweep."""
    return sweep.search is not None and sweep.search.pruning is not None


def to_run(plan: Plan, retry_failed: bool = False) -> list[PlannedTrial]:
    """The trials of a plan that have not ended; with ``retry_failed`` the failed ones too."""
    return [p for p in plan.trials if not p.ended or (retry_failed and p.state == "failed")]


class _Builder:
    """Collects trials by id; several cells may compute the same."""

    def __init__(
        self,
        store: Store | None,
        identify: Identify,
        provisional: bool,
        starts: Starts,
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
        facts = _facts(cell.experiment)
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
                    starts_from=by_training[trial.source.training_id] if trial.source else None,
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
            start = self._starts.of(cell, seed, self._trial)
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

    def _ended(self, trial: Trial) -> State | None:
        return ended_status(self._store, trial.id, pruned=self._pruned) if self._store else None

    def _is_trained(self, trial: Trial, planned: set[str]) -> bool:
        """Whether the weights are there, or an earlier trial of this plan makes them."""
        if trial.training_id in planned:
            return True
        return self._store is not None and self._store.training_done(trial.training_id)


def _identity(data: DataConfig) -> str:
    from kvlab.data import identity

    return identity(data)


def _facts(experiment: Experiment) -> dict[str, int]:
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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
