"""Run the stages of a sweep, one driver after the other."""

from collections.abc import Callable
from dataclasses import replace

from kvlab.sweep.driver.events import Summary
from kvlab.sweep.planning.stages import Stage


def run_stages(
    stage: Stage, run_stage: Callable[[Stage], Summary], plan_next: Callable[[], Stage]
) -> Summary:
    """Run a stage and all that follow it.

    A failed or diverged trial does not keep the next stage from being planned. It ends early if
    trials are missing after a stage: the driver was asked to stop, or gave up.

    Args:
        stage: The first one to run.
        run_stage: Runs one stage with a `kvlab.sweep.Driver`, which records its description even if
            no trial is missing.
        plan_next: Plans the next stage from the record; see
            `kvlab.sweep.planning.stages.plan_stage`.

    Returns:
        The states after the last stage; trials and seconds of all stages together.
    """
    total = run_stage(stage)
    while not (stage.is_last or total.stopped or total.states["missing"] or total.halt_reason):
        stage = plan_next()
        summary = run_stage(stage)
        total = replace(
            summary,
            trials_run=total.trials_run + summary.trials_run,
            seconds=total.seconds + summary.seconds,
        )
    return replace(total, has_more=total.has_more or not stage.is_last)
