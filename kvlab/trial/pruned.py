"""Trials that a search has left at a rung: recorded with their losses there, neither failed nor
measured. Whoever wants one runs it on from its checkpoint."""

from typing import Any

from kvlab.trial.ending import ending
from kvlab.trial.origin import Origin
from kvlab.trial.provenance import now, provenance
from kvlab.trial.record import Store
from kvlab.trial.result import result_document
from kvlab.trial.trial import Trial


def record_pruned(trial: Trial, store: Store, origin: Origin) -> bool:
    """Records that a trial, which has paused, does not go on for now.

    Returns:
        Whether it was recorded: not if some process runs it on, or it has ended after all.
    """
    with ending(trial, store) as free:
        if free:
            training = trial.experiment.training
            rungs = sorted(store.rungs(trial.training_id).items())
            facts = provenance(
                origin,
                started=now(),
                attempts=len(store.attempts(trial.id)),
                pauses=store.pauses(trial.id),
            )
            pruned = {"step": rungs[-1][0], "steps": training.steps, "loss": rungs[-1][1]}
            result = result_document(trial, "pruned", facts, pruned=pruned)
            result["curves"]["validation_loss"] = [
                [step, step * training.batch_tokens, loss] for step, loss in rungs
            ]
            store.write_result(result)
        return free


def pruned_line(result: dict[str, Any]) -> str:
    """Where a pruned trial stands, from its result."""
    facts = result["pruned"]
    return f"validation loss {facts['loss']:.4f} after step {facts['step']:,} of {facts['steps']:,}"
