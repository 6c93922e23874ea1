"""The tasks that an executor runs: a trial, or the smoke test of a trial's architecture."""

from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from kvlab.store.provenance import Origin
from kvlab.trial.run import Outcome, run_trial
from kvlab.trial.smoke_test import SmokeTest, run_smoke_test
from kvlab.trial.trial import Trial

Task = Trial | SmokeTest
"""Plain data, picklable, with an ``id`` and the ``resources`` that it needs."""


def run_task(
    task: Task,
    store: str | Path,
    *,
    origin: Origin,
    stop_flags: Sequence[str | Path] = (),
    capture_output: bool = False,
    wait: bool = True,
    copies: str | None = None,
) -> Outcome:
    """Run a task; see `run_trial` and `run_smoke_test`.

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
                copies=copies,
            )
        case SmokeTest():
            return run_smoke_test(task)
        case _:
            assert_never(task)
