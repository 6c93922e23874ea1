"""Plan a sweep: its trials, checked, costed and de-duplicated. Imports no torch, ray or optuna."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from kvlab.analysis.estimand import Estimand
from kvlab.analysis.trial_rows import Levels
from kvlab.data.dataset_preparation import find_dataset
from kvlab.data.shards import DatasetFacts
from kvlab.errors import UsageError
from kvlab.humanize import format_count, format_number
from kvlab.layout import KVLayout, parameter_count, training_flops
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.spec.size_config import count_size_parameters
from kvlab.spec.sweep import Cell, CellKey, Sweep
from kvlab.store import Store
from kvlab.store.record_forms import EndStatus
from kvlab.sweep.planning import texts as planned_texts
from kvlab.sweep.planning.texts import IdentifyDataset, PlannedTexts
from kvlab.sweep.planning.trunks import Branch, plan_branches
from kvlab.trial.code_identity import TrialCode
from kvlab.trial.initial_weights import InitialWeightsResolver, find_missing_source
from kvlab.trial.trial import Trial

TrialState = EndStatus | Literal["new", "shares training"]


def ended_status(store: Store, trial_id: str, *, pruned: bool = False) -> EndStatus | None:
    """Return how a trial has ended.

    Args:
        pruned: Whether a trial that a search has pruned counts as ended. It does for searches that
            prune; every other sweep needs its result.

    Returns:
        None if the trial has not ended, or if its result is damaged and is made again.
    """
    status = store.status(trial_id)
    if status == "damaged" or (status == "pruned" and not pruned):
        return None
    return status


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that the sweep needs, and what is known before it runs.

    Attributes:
        cells: Levels of every cell that it answers: several if they compute the same.
        state: In the store, or of this plan: ``new`` trains, ``shares training`` does not.
        shares_with: Id of the earlier trial of this plan that has the same training, if any.
        starts_from: Id of the first trial of this plan whose training its own starts from, if any.
        branch: What its training has in common with those of other token budgets, under wsd.
        kv_bytes_per_token: In all cache buffers together.
        kv_bytes: Of one sequence of the block size.
        flops: Of its training, whichever trial runs it.
        name: Shown to people instead of the levels: of a search, the suggested settings.
        code: That of its result. Of a trial that is to run, that of what it goes on from; see
            `begun_code`.
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
    branch: Branch = field(default_factory=Branch)
    name: str = ""
    code: TrialCode = field(default_factory=TrialCode)

    @property
    def levels(self) -> Mapping[str, str]:
        return self.cells[0]

    @property
    def label(self) -> str:
        return self.name or " ".join(f"{factor}={level}" for factor, level in self.levels.items())

    @property
    def trains(self) -> bool:
        """Whether to run it means to train."""
        return self.state == "new" and not self.trial.is_measurement

    @property
    def saved_tokens(self) -> int:
        """Tokens of its training that another token budget processes, or has processed."""
        return self.branch.steps * self.trial.experiment.training.batch_tokens

    @property
    def flops_to_do(self) -> int:
        """FLOPs of its training without those that another token budget spends."""
        return self.flops * self.tokens_to_do // max(1, self.tokens)

    @property
    def tokens_to_do(self) -> int:
        """Tokens of its training without those that another token budget processes."""
        return self.tokens - self.saved_tokens

    @property
    def has_ended(self) -> bool:
        return self.state in get_args(EndStatus)

    def with_resources(self, **changes: object) -> "PlannedTrial":
        """Return the same trial with other values of ``resources``, which keep its id."""
        experiment = self.trial.experiment
        resources = experiment.resources.model_copy(update=changes)
        experiment = experiment.model_copy(update={"resources": resources})
        return replace(self, trial=replace(self.trial, experiment=experiment))


@dataclass(frozen=True)
class PlannedCell:
    """One combination of levels, and the trial that answers it at every seed.

    Attributes:
        off: The factors that do not apply in this cell.
    """

    levels: Mapping[str, str]
    trials: Mapping[int, str]
    off: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        trials = {str(seed): trial for seed, trial in self.trials.items()}
        off = {"off": sorted(self.off)} if self.off else {}
        return {"levels": dict(self.levels), "trials": trials, **off}


@dataclass(frozen=True)
class Plan:
    """What a sweep runs, the baseline first.

    Attributes:
        trials: Every trial once, cell by cell, seed by seed.
        cells: Every cell of the design, also those whose trials another cell has.
        absent: Why a dataset or a checkpoint is unavailable, one line each. Then the ids are
            provisional: they change once it is there and can be identified.
        notes: What is unusual about the text, and defaults that are lowered to it, one line each.
    """

    sweep: Sweep
    trials: tuple[PlannedTrial, ...]
    cells: tuple[PlannedCell, ...] = field(repr=False)
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    texts: tuple[DatasetFacts, ...] = field(default=(), repr=False)

    @property
    def training_count(self) -> int:
        """Number of distinct trainings."""
        return len({planned.trial.training_id for planned in self.trials})

    @property
    def flops(self) -> int:
        """Training FLOPs that are still to be spent."""
        return sum(planned.flops_to_do for planned in self.trials if planned.trains)

    @property
    def tokens(self) -> int:
        """Training tokens that are still to be processed."""
        return sum(planned.tokens_to_do for planned in self.trials if planned.trains)

    @property
    def saved_tokens(self) -> int:
        """Training tokens saved by stable phases that token budgets share."""
        return sum(planned.saved_tokens for planned in self.trials if planned.trains)

    def count_states(self) -> dict[TrialState, int]:
        """Return the number of trials in every state that occurs."""
        return dict(Counter(planned.state for planned in self.trials))

    def format_totals(self) -> str:
        """Return ``36 trials, 24 trainings: 12 trials share a training with another``."""
        trials, trainings = len(self.trials), self.training_count
        text = f"{format_count(trials, 'trial')}, {format_count(trainings, 'training')}"
        if sharing := trials - trainings:
            verb = "trial shares" if sharing == 1 else "trials share"
            text += f": {sharing:,} {verb} a training with another"
        if self.saved_tokens:
            branching = sum(planned.branch.steps > 0 for planned in self.trials if planned.trains)
            verb = "training branches" if branching == 1 else "trainings branch"
            text += f"; {branching:,} {verb} from a shared stable phase, which saves"
            text += f" {format_number(self.saved_tokens)} tokens"
        return text


@dataclass(frozen=True)
class Stage:
    """What a sweep runs next; see `kvlab.sweep.planning.stages`.

    Attributes:
        plan: All trials up to this stage.
        name: Shown to people, such as ``design``; empty for a sweep with one stage.
        number: Stages are counted from 1. ``sweep.json`` keeps the latest one.
        is_last: Whether no stage follows, however its trials end.
        declaration: What all stages share, as JSON. Drivers with other declarations cannot join.
            None for a sweep with one stage.
        record: Further keys of ``sweep.json``: what was decided before this stage, and why.
        lines: What was decided since the stage before, for people.
        found: What all stages before it have found, in sentences.
        is_preparing: Whether its trials find settings, and those of the design are not known yet.
    """

    plan: Plan
    name: str = ""
    number: int = 1
    is_last: bool = True
    declaration: Mapping[str, Any] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    is_preparing: bool = False

    def after(self, other: "Stage") -> "Stage":
        """Return this stage as one that follows ``other``, whose record and lines it keeps."""
        return replace(
            self,
            number=other.number + self.number,
            declaration={**(other.declaration or {}), **(self.declaration or {})},
            record={**other.record, **self.record},
            lines=(*other.lines, *self.lines),
            found=other.found,
        )


_Found = tuple[Trial, list[Mapping[str, str]], dict[str, Any]]
"""A trial, the levels of its cells, since several cells may compute the same, and its costs."""


def _estimate_costs(experiment: Experiment) -> dict[str, Any]:
    """Return the costs of a `PlannedTrial`."""
    model, training = experiment.model, experiment.training
    layout = KVLayout.of(model, experiment.serving)
    return {
        "parameters": parameter_count(model),
        "kv_bytes_per_token": layout.bytes_per_token(MODEL_DTYPE),
        "kv_bytes": layout.stored_bytes(1, model.block_size, MODEL_DTYPE),
        "flops": training_flops(experiment),
        "tokens": training.steps * training.batch_tokens,
    }


@dataclass(frozen=True)
class SweepPlanner:
    """Plan cells of one sweep: what the planners of its stages share; see `plan`."""

    sweep: Sweep
    store: Store | None = None
    identify: IdentifyDataset | None = None
    provisional: bool = False

    def read_record(self) -> dict[str, Any]:
        """Return the content of ``sweep.json``; nothing before the first submit."""
        try:
            return self.store.sweep(self.sweep.name) if self.store is not None else {}
        except UsageError:
            return {}

    def plan(self, cells: Sequence[Cell]) -> Plan:
        sweep, store = self.sweep, self.store
        resolver = InitialWeightsResolver(sweep, cells, provisional=self.provisional)
        known = {} if store is None else planned_texts.read_known_texts(store, sweep.name)
        default = find_dataset if self.provisional else planned_texts.prepare_text
        texts = PlannedTexts(sweep, self.identify or default, self.provisional, known)
        texts.check(cells)
        made: dict[tuple[CellKey, int], Trial] = {}

        def make_trial(cell: Cell, seed: int) -> Trial:
            if (cell.key, seed) not in made:
                experiment = texts.fit(planned_texts.with_absolute_paths(cell.experiment))
                dataset_id = texts.identity(experiment.data)
                initial_weights = resolver.resolve(cell, seed, make_trial)
                made[cell.key, seed] = Trial.of(experiment, dataset_id, seed, initial_weights)
            return made[cell.key, seed]

        planned_cells, found = [], dict[str, _Found]()
        for cell in cells:
            trials, costs = {}, _estimate_costs(cell.experiment)
            for seed in cell.seeds:
                trial = make_trial(cell, seed)
                trials[seed] = trial.id
                found.setdefault(trial.id, (trial, [], costs))[1].append(cell.levels)
            planned_cells.append(PlannedCell(cell.levels, trials, cell.off))
        planned = self._plan_trials(found)
        absent = (*texts.absent, *resolver.absent)
        notes = (*texts.notes, *([] if store is None else describe_lost_sources(planned, store)))
        return Plan(sweep, planned, tuple(planned_cells), absent, notes, texts.facts())

    def _plan_trials(self, found: dict[str, _Found]) -> tuple[PlannedTrial, ...]:
        """Return the trials with their states, which trainings they share, and their branches."""
        # training id -> the first trial of this plan that has it
        first_trial = {one.training_id: one.id for one, *_ in reversed(found.values())}
        store, is_pruned = self.store, uses_pruning(self.sweep)
        planned_trainings, planned = set[str](), list[PlannedTrial]()
        for trial, cells, costs in found.values():
            state: TrialState | None = None
            if store is not None:
                state = ended_status(store, trial.id, pruned=is_pruned)
            if state is None:
                is_trained = trial.training_id in planned_trainings or (
                    store is not None and store.is_trained(trial.training_id)
                )
                state = "shares training" if is_trained else "new"
                planned_trainings.add(trial.training_id)
            code = TrialCode()
            if store is not None and state in ("new", "shares training"):
                code = begun_code(trial, store)
            elif store is not None:
                code = TrialCode.of(store.code(trial.id))
            first, source = first_trial[trial.training_id], trial.source_training
            planned.append(
                PlannedTrial(
                    trial,
                    cells=tuple(cells),
                    state=state,
                    shares_with=None if first == trial.id else first,
                    starts_from=first_trial[source.training_id] if source else None,
                    code=code,
                    **costs,
                )
            )
        branches = plan_branches([one.trial for one in planned if one.trains], store)
        for number, one in enumerate(planned):
            branch = branches.get(one.trial.training_id)
            if branch is not None:  # any trial of a training may run it
                trial = replace(one.trial, shared_steps=branch.shared_steps)
                own = branch if one.trains else Branch()
                planned[number] = replace(one, trial=trial, branch=own)
        return tuple(planned)


def plan(
    sweep: Sweep,
    store: Store | None = None,
    *,
    identify: IdentifyDataset | None = None,
    provisional: bool = False,
) -> Plan:
    """Plan the trials of every cell and seed of a sweep.

    A trial's id contains the digest of its text's tokens, so the text is prepared first. Every
    text is checked against what the cells ask of it.

    Args:
        store: Where finished trials are looked up; None takes all trials as new.
        identify: Returns the facts of a dataset; by default those of `kvlab.data.prepare_dataset`,
            or of `kvlab.data.find_dataset` if ``provisional``.
        provisional: Plan even if a text is not prepared or a checkpoint is not here, as before a
            download; see ``Plan.absent``.

    Raises:
        SpecError: A cell is impossible, asks for more text than there is, or names text that
            cannot be read; or a checkpoint to start from is unavailable.
        DataError: A dataset is unavailable, and ``provisional`` is not set.
    """
    return SweepPlanner(sweep, store, identify, provisional).plan(sweep.cells())


def describe_lost_sources(trials: Sequence[PlannedTrial], store: Store) -> Iterator[str]:
    """Yield a line for each training that is made again, since others start from its weights."""
    done = {planned.trial.training_id for planned in trials if planned.state == "done"}
    lost = Counter[tuple[str, str]]()
    for planned in trials:
        source = find_missing_source(planned.trial, store)
        if source is not None and source.training_id in done and planned.trains:
            lost[source.training_id, source.name] += 1
    for (training, name), count in lost.items():
        text = f"the weights of training {training} ({name}) are damaged or gone;"
        reason = f"{format_count(count, 'training')} to come would start from them"
        yield f"{text} they are made again, because {reason}"


def begun_code(trial: Trial, store: Store) -> TrialCode:
    """Return the code that has trained what a trial goes on from; none if it begins anew.

    That is its training, or the stable phase or the training that this one starts from.
    """
    training = store.training_code(trial.training_id)
    if not training and trial.source_training is not None:
        training = store.training_code(trial.source_training.training_id)
    if not training and trial.trunk_id is not None:
        training = store.trunk_code(trial.trunk_id, trial.experiment.training.stable_steps)
    return TrialCode(tuple(training))


def uses_pruning(sweep: Sweep) -> bool:
    """Return whether a pruned trial counts as ended in this sweep."""
    return sweep.search is not None and sweep.search.pruning is not None


def trials_to_run(plan: Plan, retry_failed: bool = False) -> list[PlannedTrial]:
    """Return the trials that have not ended; with ``retry_failed`` the failed ones, too."""
    return [p for p in plan.trials if not p.has_ended or (retry_failed and p.state == "failed")]


def plan_estimand(sweep: Sweep, cells: Sequence[Levels]) -> Estimand:
    """Return which cells of a sweep enter means over settings, before any has run."""
    patches = sweep.model_dump(mode="json")["factors"]
    return Estimand(cells, sweep.level_names, patches, over=sweep.decide.over or {})


def describe_stage(stage: Stage, **facts: Any) -> dict[str, Any]:
    """Return the content of ``sweep.json`` for a stage; for ``facts`` see `describe_sweep`."""
    description = {**describe_sweep(stage.plan, **facts), **stage.record}
    if stage.declaration is not None:
        own = {"number": stage.number, "name": stage.name, "is_last": stage.is_last}
        description["stages"] = {"declared": dict(stage.declaration), **own}
    return description


def describe_sweep(
    plan: Plan,
    *,
    yaml: str,
    experiment_yaml: str,
    command: str,
    code: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the content of ``sweep.json``: the question as submitted, and its trials.

    ``code`` is what all of its drivers run; None if they may run any.
    """
    sweep, optional = plan.sweep, dict[str, Any]()
    optional["texts"] = {text.identity: asdict(text) for text in plan.texts if text.identity}
    if sweep.size is not None:
        parameters = count_size_parameters(sweep, sweep.cells())
        optional["size"] = {**sweep.size.model_dump(mode="json"), "parameters": parameters}
    optional["match"] = [] if sweep.match == "none" else [sweep.match]
    optional["search"] = sweep.search and sweep.search.model_dump(mode="json")
    optional |= {"scale": sweep.source.scale, "code": code and dict(code)}
    return {
        "name": sweep.name,
        "question": sweep.question,
        "factors": {factor: list(levels) for factor, levels in sweep.level_names.items()},
        "patches": sweep.model_dump(mode="json")["factors"],
        "baseline": dict(sweep.baseline),
        "design": " + ".join(sweep.design_seeds),
        "designed": sweep.selection.designed,
        "rules": [str(rule) for rule in sweep.selection.rules],
        "notes": list(sweep.selection.notes),
        "seeds": list(sweep.all_seeds),
        "decide": {**sweep.decide.model_dump(mode="json"), "claims": list(sweep.claims)},
        "report": sweep.report.model_dump(mode="json"),
        "cells": [cell.to_json() for cell in plan.cells],
        "yaml": yaml,
        "yaml_sha256": hashlib.sha256(yaml.encode()).hexdigest(),
        "experiment_yaml": experiment_yaml,
        "command": command,
        **{key: value for key, value in optional.items() if value},
    }
