"""The tasks that an executor runs: a trial, a smoke test, or a session that times trials again."""

from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from kvlab.store.provenance import Origin
from kvlab.trial.joint_timing import JointTiming, run_joint_timing
from kvlab.trial.run import Outcome, run_trial
from kvlab.trial.smoke_test import SmokeTest, run_smoke_test
from kvlab.trial.trial import Trial

Task = Trial | SmokeTest | JointTiming
"""Plain data, picklable, with an ``id`` and the ``resources`` that it needs."""


def run_task(
    task: Task,
    store: str | Path,
    *,
    origin: Origin,
    stop_flags: Sequence[str | Path] = (),
    capture_output: bool = False,
    wait: bool = True,
) -> Outcome:
    """Run a task; see `run_trial`, `run_smoke_test` and `run_joint_timing`.

    Raises:
        StoreError: nothing can be written.
    """
    match task:
        case Trial():
            return run_trial(
                task,
                store,
                origin=origin,
                stop_flags=stop_flags,
                capture_output=capture_output,
                wait=wait,
            )
        case SmokeTest():
            return run_smoke_test(task)
        case JointTiming():
            return run_joint_timing(task, stop_flags)
        case _:
            assert_never(task)
