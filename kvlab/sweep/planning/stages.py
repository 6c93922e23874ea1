"""Plan a sweep stage by stage: what runs next may depend on how the trials before it have ended.

A stage's plan contains all trials that the sweep has asked for so far, so that a driver runs those
that are missing. It is computed from the record alone. So every driver computes the same stage,
also after a kill, and several drivers of one sweep go through the same stages. Most sweeps have
one stage. A `StagePlanner` plans several. A search has one stage, to which
`kvlab.extensions.search.searcher` adds trials while it runs.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Protocol

from kvlab.analysis.sequential import has_taken_tests
from kvlab.errors import SpecError
from kvlab.own_extensions import find_members
from kvlab.spec import Sweep
from kvlab.spec.seeds_config import StagedSeeds
from kvlab.spec.sweep import Cell
from kvlab.store import Store
from kvlab.sweep.planning.planner import Plan, Stage, SweepPlanner
from kvlab.sweep.planning.texts import IdentifyDataset


class StagePlanner(Protocol):
    """Plan stages. `StagedSeeds.planner` names one that adds seeds to cells.

    It is made from a `SweepPlanner` and the cells.
    """

    def plan(self) -> Stage:
        """Return the stage that the record asks for, with what ``sweep.json`` keeps of it."""

    def plan_most(self) -> Plan:
        """Return the trials of all stages, after `plan`, if they become as many as they may."""


def _find_seed_planner(planner: SweepPlanner, cells: Sequence[Cell]) -> StagePlanner | None:
    """Return what adds seeds to the cells of a sweep; None if they have all from the start."""
    seeds = planner.sweep.seeds
    return resolve_name(seeds.planner)(planner, cells) if isinstance(seeds, StagedSeeds) else None


class Preparation(StagePlanner, Protocol):
    """Plan the stages that find settings of cells: of table ``preparations``, by a sweep's key.

    It is made from a `SweepPlanner`. The last stage is not ``is_preparing``.
    """

    def cells(self) -> tuple[Cell, ...]:
        """Return the cells of the design with what was found so far, after `plan`."""

    @staticmethod
    def reopen(store: Store, sweep: str, others: Collection[str] | None = None) -> None:
        """Set results of a sweep aside, which may not have been submitted, to find settings anew.

        Args:
            others: Trials that are to run again; None for those that failed.
        """


def _find_preparation(planner: SweepPlanner) -> tuple[str, Preparation | None]:
    """Return the key of a sweep that asks for settings, and what finds them; None if none does."""
    for key, make in find_members("preparations").items():
        if getattr(planner.sweep, key) is not None:
            return key, make(planner)
    return "", None


def reopen_preparations(store: Store, sweep: str, others: Collection[str] | None = None) -> None:
    """Find settings of a sweep anew; see `Preparation.reopen`."""
    for one in find_members("preparations").values():
        one.reopen(store, sweep, others)


def plan_stage(
    sweep: Sweep,
    store: Store | None = None,
    *,
    identify: IdentifyDataset | None = None,
    provisional: bool = False,
) -> Stage:
    """Plan the stage that a sweep's record asks for.

    If all trials of a stage have ended, it is the next one, until a stage is the last.

    Args:
        store: The record; None takes it as empty.

    Raises:
        SpecError: A cell is impossible, a checkpoint is unavailable, or the sweep declares
            something else than before its first stage.
        DataError: A dataset is unavailable, and ``provisional`` is not set.
        StoreError: The record is damaged.
    """
    planner = SweepPlanner(sweep, store, identify, provisional)
    cells, prepared = sweep.cells(), None
    key, preparation = _find_preparation(planner)
    if preparation is not None:
        prepared = preparation.plan()
        if prepared.is_preparing:
            if not prepared.plan.absent:
                _check_no_test_was_taken(planner, key)
            return prepared
        cells = preparation.cells()
    if (adding := _find_seed_planner(planner, cells)) is not None:
        stage = adding.plan()
    else:
        _check_no_test_was_taken(planner, "seeds")
        stage = Stage(planner.plan(cells), "design" if prepared else "")
    return stage if prepared is None else stage.after(prepared)


def plan_at_least(stage: Stage, planner: SweepPlanner) -> Plan:
    """Plan the least that a sweep still needs: a stage's trials, and the design that it prepares.

    The design's trials have the settings of the experiment while their own are not known.
    """
    if not stage.is_preparing:
        return stage.plan
    planner, cells = replace(planner, store=None), planner.sweep.cells()
    adding = _find_seed_planner(planner, cells)
    design = planner.plan(cells) if adding is None else adding.plan().plan
    return replace(stage.plan, trials=(*stage.plan.trials, *design.trials))


def plan_at_most(planner: SweepPlanner) -> Plan | None:
    """Plan the most that a sweep may still need, whatever its trials show; see `plan_stage`.

    Returns:
        None if no stage depends on how trials end, so that the plan of `plan_stage` is all.
    """
    cells, rounds = planner.sweep.cells(), None
    if (preparation := _find_preparation(planner)[1]) is not None:
        if preparation.plan().is_preparing:
            rounds = preparation.plan_most()
            planner = replace(planner, store=None)
        cells = preparation.cells()
    if (adding := _find_seed_planner(planner, cells)) is not None:
        design = adding.plan_most()
    elif rounds is None:
        return None
    else:
        design = planner.plan(cells)
    return design if rounds is None else replace(rounds, trials=(*rounds.trials, *design.trials))


def _check_no_test_was_taken(planner: SweepPlanner, key: str) -> None:
    """Check that no claim was tested, which the error of the present spec would leave out."""
    if has_taken_tests(planner.read_record()):
        text = f"{key} was another when claims were tested, and the error holds for that alone"
        hint = "restore it, or start anew with another name and seeds that no test has seen"
        raise SpecError([planner.sweep.source.document.problem((key,), f"{text}; {hint}")])
