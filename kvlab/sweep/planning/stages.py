"""Plan a sweep stage by stage: what runs next may depend on how the trials before it have ended.

A stage's plan contains all trials that the sweep has asked for so far, so that a driver runs those
that are missing. It is computed from the record alone. So every driver computes the same stage,
also after a kill, and several drivers of one sweep go through the same stages. Most sweeps have
one stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.errors import SpecError, UsageError
from kvlab.spec.seeds_config import SeedLooks
from kvlab.spec.sweep import Sweep
from kvlab.store import Store
from kvlab.sweep.planning.looks import RECORD_KEY, LookPlan, LookPlanner
from kvlab.sweep.planning.planner import (
    Plan,
    PlannedCell,
    describe_sweep,
    plan,
)
from kvlab.sweep.planning.texts import IdentifyDataset
from kvlab.sweep.planning.tuning import Tuning, plan_most_tuning, plan_tuning


@dataclass(frozen=True)
class Stage:
    """What a sweep runs next.

    Attributes:
        plan: All trials up to this stage.
        name: Shown to people, such as ``look 2 of 4``; empty for a sweep with one stage.
        number: Stages are counted from 1. ``sweep.json`` keeps the latest one.
        is_last: Whether no stage follows, however its trials end.
        declaration: What all stages share, as JSON. Drivers with other declarations cannot join.
            None for a sweep with one stage.
        record: Further keys of ``sweep.json``: what was decided before this stage, and why.
        lines: What was decided since the stage before, for people.
    """

    plan: Plan
    name: str = ""
    number: int = 1
    is_last: bool = True
    declaration: Mapping[str, Any] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    @property
    def is_tuning(self) -> bool:
        """Whether its trials find settings, and those of the design are not known yet."""
        return "tuning" in self.record and not self.record["tuning"]["is_over"]


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
        sweep: From `kvlab.spec.load_sweep`.
        store: The record; None takes it as empty.
        identify: Returns the digest of a dataset's text; see `kvlab.sweep.plan`.
        provisional: Plan even if a dataset or a checkpoint is unavailable; see `kvlab.sweep.plan`.

    Raises:
        SpecError: A cell is impossible, a checkpoint is unavailable, or the sweep declares
            something else than before its first stage.
        DataError: A dataset is unavailable, and ``provisional`` is not set.
        StoreError: The record is damaged.
    """
    tuning = None
    if sweep.tune is not None:
        tuning = plan_tuning(sweep, store, identify=identify, provisional=provisional)
        if not tuning.is_over:
            if not tuning.plan.absent:
                text = "tune: the cells of the design had other rates at the first look"
                _check_no_look_was_taken(sweep, store, "tune", text)
            return _tuning_stage(tuning)
    cells = sweep.cells() if tuning is None else tuning.tuned_cells()
    if sweep.looks is None:
        text = "seeds had looks, and some of them were taken"
        _check_no_look_was_taken(sweep, store, "seeds", text)
        planned = plan(sweep, store, identify=identify, provisional=provisional, cells=cells)
        stage = Stage(planned, "" if tuning is None else "design")
    else:
        looks = LookPlanner(sweep, cells, store, identify=identify, provisional=provisional)
        stage = _look_stage(sweep.looks, looks.plan())
    return stage if tuning is None else _follow_tuning(stage, tuning)


def plan_at_least(
    stage: Stage, *, identify: IdentifyDataset | None = None, provisional: bool = False
) -> Plan:
    """Plan the least that a sweep still needs: a stage's trials, and the design if it is tuned.

    The design's trials have the rates of the recipe while their own are not known.

    Args:
        stage: From `plan_stage`.
        identify: Returns the digest of a dataset's text; see `kvlab.sweep.plan`.
        provisional: Plan even if a dataset is unavailable; see `kvlab.sweep.plan`.
    """
    sweep = stage.plan.sweep
    if not stage.is_tuning:
        return stage.plan
    untuned = sweep.model_copy(update={"tune": None})
    design = plan_stage(untuned, None, identify=identify, provisional=provisional).plan
    return replace(stage.plan, trials=(*stage.plan.trials, *design.trials))


def plan_at_most(
    sweep: Sweep,
    store: Store | None,
    *,
    identify: IdentifyDataset | None = None,
    provisional: bool = False,
) -> Plan | None:
    """Plan the most that a sweep may still need, whatever its trials show; see `plan_stage`.

    Returns:
        None if no stage depends on how trials end, so that the plan of `plan_stage` is all.
    """
    tuning, cells = None, sweep.cells()
    if sweep.tune is not None:
        tuning = plan_most_tuning(sweep, store, identify=identify, provisional=provisional)
        cells = tuning.tuned_cells()
        store = store if tuning.is_over else None
    design = None
    if sweep.looks is not None:
        looks = LookPlanner(sweep, cells, store, identify=identify, provisional=provisional)
        design = looks.plan_most()
    if tuning is None or tuning.is_over:
        return design
    if design is None:
        design = plan(sweep, None, identify=identify, provisional=provisional, cells=cells)
    return replace(tuning.plan, trials=(*tuning.plan.trials, *design.trials))


def _check_no_look_was_taken(sweep: Sweep, store: Store | None, key: str, text: str) -> None:
    """Check that the record has no look, which the error of the present spec would leave out.

    Raises:
        SpecError: It has one; ``text`` is what has changed since, at a key of the sweep's file.
    """
    try:
        recorded = store.sweep(sweep.name) if store is not None else {}
    except UsageError:
        return
    if recorded.get(RECORD_KEY, {}).get("taken"):
        hint = "restore it, or start anew with another name and seeds that no look has seen"
        message = f"{text}, whose error holds for that alone; {hint}"
        raise SpecError([sweep.source.document.problem((key,), message)])


def _tuning_stage(tuning: Tuning) -> Stage:
    """Return a round of the tuning as a stage; the cells of the design have no trials yet."""
    cells = tuple(PlannedCell(cell.levels, {}, cell.off) for cell in tuning.sweep.cells())
    return Stage(
        replace(tuning.plan, cells=cells),
        f"tuning {tuning.round}",
        tuning.round,
        False,
        {"tune": tuning.declare()},
        {"tuning": tuning.describe()},
        tuning.lines,
    )


def _follow_tuning(stage: Stage, tuning: Tuning) -> Stage:
    """Return a stage of the design as one that follows the rounds of the tuning."""
    return replace(
        stage,
        number=tuning.round + stage.number,
        declaration={"tune": tuning.declare(), **(stage.declaration or {})},
        record={"tuning": tuning.describe(), **stage.record},
        lines=(*tuning.lines, *stage.lines),
    )


def _look_stage(seeds: SeedLooks, look: LookPlan) -> Stage:
    name = f"look {look.number} of {len(seeds.looks)}"
    return Stage(
        look.plan,
        "all looks taken" if look.is_last else name,
        len(look.taken) + 1,
        look.is_last,
        {RECORD_KEY: look.declaration},
        look.record,
        look.lines,
    )


def describe_stage(
    stage: Stage, *, yaml: str, experiment_yaml: str, command: str
) -> dict[str, Any]:
    """Return the content of ``sweep.json`` for a stage.

    Args:
        stage: From `plan_stage`.
        yaml: Text of the sweep's file.
        experiment_yaml: Text of the base experiment's file.
        command: As typed, without absolute paths.
    """
    description = describe_sweep(
        stage.plan, yaml=yaml, experiment_yaml=experiment_yaml, command=command
    )
    if stage.declaration is None:
        return description
    stages = {
        "declared": dict(stage.declaration),
        "number": stage.number,
        "name": stage.name,
        "is_last": stage.is_last,
    }
    return {**description, **stage.record, "stages": stages}
