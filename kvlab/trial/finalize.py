"""End trials from the driver: those that cannot record their own end, or are not to go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvlab.fs.lease import Fence
from kvlab.store import Status, Store
from kvlab.store.attempt import Attempt
from kvlab.store.provenance import Origin, utc_now
from kvlab.store.result import Failure
from kvlab.store.verification import heal_directory
from kvlab.trial.trial import Trial, build_result, describe_origin, describe_trial

LOCK_PATIENCE_SECONDS = 5.0
"""How long to wait for a process that is about to release the trial."""


@contextmanager
def claim_result(
    trial: Trial, store: Store, replaceable: tuple[Status, ...] = ()
) -> Iterator[Fence | None]:
    """Hold a trial's lock and yield its fence if the block may write the trial's result.

    An earlier result is archived. The block may not write if a process runs the trial, or if the
    trial has ended with a status that is not in ``replaceable``.
    """
    with store.trial_lock(trial.id).hold(timeout=LOCK_PATIENCE_SECONDS) as fence:
        if fence is not None:
            heal_directory(store.trial_directory(trial.id), fence)
        status = store.status(trial.id)
        may_write = fence is not None and (status is None or status in replaceable)
        if may_write and status is not None:
            store.archive_result(trial.id)
        yield fence if may_write else None


def record_failure(
    trial: Trial, store: Store, origin: Origin, failure: Failure, smoke_trace: str | None = None
) -> bool:
    """Record the failure of a trial that cannot, such as one whose process is killed repeatedly.

    Args:
        smoke_trace: The traceback, if its architecture failed in a smoke test; that is logged.

    Returns:
        Whether it was recorded: not if a process still runs it, or if it has ended.
    """
    with claim_result(trial, store, () if smoke_trace is None else ("pruned",)) as fence:
        if fence is None:
            return False
        started = utc_now()
        if smoke_trace is not None:
            store.write_trial(trial.id, describe_trial(trial), fence)
            attempt = Attempt(store, trial.id, fence)
            attempt.log("not run: one step of its architecture failed in the smoke test")
            path = attempt.write_traceback(smoke_trace)
            message = f"in the smoke test: {failure.message}"
            failure = replace(failure, message=message, traceback=path)
        provenance = describe_origin(trial, store, origin, started)
        store.write_result(build_result(trial, "failed", provenance, failure=failure), fence)
        return True


def record_pruned(trial: Trial, store: Store, origin: Origin) -> bool:
    """Record that a search leaves a paused trial at its rung.

    It is neither failed nor measured; a later submit continues it from its checkpoint.

    Returns:
        Whether it was recorded: not if a process continues it, or if it has ended.
    """
    with claim_result(trial, store) as fence:
        if fence is None:
            return False
        training = trial.experiment.training
        rungs = sorted(store.rungs(trial.training_id).items())
        step, loss = rungs[-1]
        pruned = {"step": step, "steps": training.steps, "loss": loss}
        provenance = describe_origin(trial, store, origin, utc_now())
        result = build_result(trial, "pruned", provenance, pruned=pruned)
        result["curves"]["validation_loss"] = [
            [step, step * training.batch_tokens, loss] for step, loss in rungs
        ]
        store.write_result(result, fence)
        return True
