"""Plan a sweep stage by stage: what runs next may depend on how the trials before it have ended.

A stage's plan contains all trials that the sweep has asked for so far, so that a driver runs those
that are missing. It is computed from the record alone. So every driver computes the same stage,
also after a kill, and several drivers of one sweep go through the same stages. Most sweeps have
one stage. Several are planned by `TuningPlanner` and `LookPlanner`: ``plan`` returns the stage that
the record asks for, with what ``sweep.json`` keeps of it, and ``plan_most`` the trials of all
stages, if they become as many as they may. A search has one stage, to which
`kvlab.sweep.search.searcher` adds trials while it runs.
"""

from dataclasses import replace

from kvlab.errors import SpecError
from kvlab.spec.sweep import Sweep
from kvlab.store import Store
from kvlab.sweep.planning import looks
from kvlab.sweep.planning.planner import Plan, Stage, SweepPlanner
from kvlab.sweep.planning.texts import IdentifyDataset
from kvlab.sweep.planning.tuning import TuningPlanner


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
    planner = SweepPlanner(sweep, store, identify, provisional)
    cells, tuned = sweep.cells(), None
    if sweep.tune is not None:
        tuning = TuningPlanner(planner)
        tuned = tuning.plan()
        if tuned.is_tuning:
            if not tuned.plan.absent:
                text = "tune: the cells of the design had other rates at the first look"
                _check_no_look_was_taken(planner, "tune", text)
            return tuned
        cells = tuning.tuned_cells()
    if sweep.looks is not None:
        stage = looks.LookPlanner(planner, cells).plan()
    else:
        text = "seeds had looks, and some of them were taken"
        _check_no_look_was_taken(planner, "seeds", text)
        stage = Stage(planner.plan(cells), "design" if tuned else "")
    return stage if tuned is None else stage.after(tuned)


def plan_at_least(stage: Stage, planner: SweepPlanner) -> Plan:
    """Plan the least that a sweep still needs: a stage's trials, and the design if it is tuned.

    The design's trials have the rates of the recipe while their own are not known.

    Args:
        stage: From `plan_stage`.
        planner: Of the same sweep.
    """
    if not stage.is_tuning:
        return stage.plan
    untuned = stage.plan.sweep.model_copy(update={"tune": None})
    found, is_provisional = planner.identify, planner.provisional
    design = plan_stage(untuned, None, identify=found, provisional=is_provisional).plan
    return replace(stage.plan, trials=(*stage.plan.trials, *design.trials))


def plan_at_most(planner: SweepPlanner) -> Plan | None:
    """Plan the most that a sweep may still need, whatever its trials show; see `plan_stage`.

    Returns:
        None if no stage depends on how trials end, so that the plan of `plan_stage` is all.
    """
    sweep = planner.sweep
    cells, rounds = sweep.cells(), None
    if sweep.tune is not None:
        tuning = TuningPlanner(planner)
        if tuning.plan().is_tuning:
            rounds = tuning.plan_most()
            planner = replace(planner, store=None)
        cells = tuning.tuned_cells()
    if sweep.looks is not None:
        design = looks.LookPlanner(planner, cells).plan_most()
    elif rounds is None:
        return None
    else:
        design = planner.plan(cells)
    return design if rounds is None else replace(rounds, trials=(*rounds.trials, *design.trials))


def _check_no_look_was_taken(planner: SweepPlanner, key: str, text: str) -> None:
    """Check that the record has no look, which the error of the present spec would leave out.

    Raises:
        SpecError: It has one; ``text`` is what has changed since, at a key of the sweep's file.
    """
    if planner.read_record().get(looks.RECORD_KEY, {}).get("taken"):
        hint = "restore it, or start anew with another name and seeds that no look has seen"
        message = f"{text}, whose error holds for that alone; {hint}"
        raise SpecError([planner.sweep.source.document.problem((key,), message)])
