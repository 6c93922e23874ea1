"""What a driver exchanges with its caller, and how fast a sweep goes and how long it still takes.

A driver sends events, takes more trials from a source, and returns a summary. The pace follows from
the record alone, so that any process can tell it, whoever drives the sweep.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal, Protocol

from kvlab.analysis.compute import seconds_between
from kvlab.errors import StoreError
from kvlab.store import Store
from kvlab.store.attempt import ProgressUpdate
from kvlab.sweep.planning.planner import PlannedTrial

PrepareTrials = Callable[[list[PlannedTrial], Callable[[], None]], list[PlannedTrial]]
"""Prepare what the missing trials share, and return them as they are to be run.

It may end some of the trials itself. The second argument raises `kvlab.errors.Stopped` once the
driver has been asked to stop.
"""


@dataclass(frozen=True)
class Event:
    """Something that happened to a trial.

    Attributes:
        kind: ``started``; ``ended``; ``retried``: it is started again; ``healed``: what it needs
            was damaged and is made again; ``halted``: the driver starts no more trials;
            ``waiting``: another process runs it, or nothing runs and there is no room for it.
        planned: The trial.
        status: Of ``ended``: the status of its result, or ``stopped`` at a checkpoint, ``paused``
            at a rung of a search, ``trained`` if one worker is to measure what several have
            trained, ``elsewhere`` if another process runs it.
        seconds: Of ``ended``: how long it ran; None if another process has ended it.
        message: Of ``retried``, ``halted`` and ``waiting``: the reason; of ``healed``, what.
    """

    kind: Literal["started", "ended", "retried", "healed", "halted", "waiting"]
    planned: PlannedTrial
    status: str = ""
    seconds: float | None = None
    message: str = ""


class TrialSource(Protocol):
    """Supply a driver with more trials while it runs, as a search does.

    All methods are called by the driver's thread.

    Attributes:
        stop_reason: Why there will be no more trials; empty as long as there may be.
    """

    stop_reason: str

    def ask(self) -> PlannedTrial | None:
        """Return one more trial, which may have ended before; None if there is none for now."""

    def tell(self, planned: PlannedTrial, status: str) -> None:
        """Take how a trial ended. Trials of another source are ignored."""

    def resume_or_prune(self, planned: PlannedTrial) -> PlannedTrial | None:
        """Decide about a trial that has reached the step at which it was to pause.

        Returns:
            The trial with its next ``until``, to go on; None if it is pruned for now. `ask` may
            return it again.
        """


@dataclass
class Summary:
    """The state of a sweep after a driver's run.

    Attributes:
        states: Number of trials by how they ended: ``done``, ``failed``, ``diverged``,
            ``pruned``, or ``missing``.
        trials_run: Number of trials that ended in this run, in this driver.
        stopped: Whether the driver was asked to stop.
        halt_reason: Why the driver gave up before the end, if it did.
        has_more: Whether the source of trials was to supply more, or a stage was to follow.
    """

    states: Counter[str] = field(default_factory=Counter)
    trials_run: int = 0
    stopped: bool = False
    halt_reason: str = ""
    has_more: bool = False

    @property
    def exit_code(self) -> int:
        """0 if all trials ended without a failure, 1 if some failed, 130 if stopped early."""
        if self.stopped and (self.states["missing"] or self.has_more):
            return 130
        return 1 if self.states["failed"] or self.states["missing"] else 0


NOT_OVER = ("stopped", "paused", "trained", "elsewhere")
"""The statuses of events of trials that have no result."""


# Pace and time left


MAX_RESULTS_READ = 64
"""Results that the mean duration is taken over, the newest first: a store may hold thousands."""


def list_durations(store: Store, done: Iterable[str]) -> list[float]:
    """Return the seconds that finished trials took, the newest first; see `MAX_RESULTS_READ`."""
    ended_at: dict[str, float] = {}
    for trial_id in done:
        with contextlib.suppress(OSError):
            path = store.trial_directory(trial_id) / "result.json"
            ended_at[trial_id] = path.stat().st_mtime
    durations = []
    for trial_id in sorted(ended_at, key=ended_at.__getitem__, reverse=True)[:MAX_RESULTS_READ]:
        with contextlib.suppress(StoreError):
            if (result := store.result(trial_id)) is not None:
                provenance, training = result["provenance"], result["training_record"] or {}
                seconds = seconds_between(provenance["started"], provenance["finished"])
                durations.append(max(1.0, seconds))
                if provenance["attempts"] > 1:  # it was trained in the attempts before
                    durations[-1] = max(durations[-1], training.get("seconds", 0.0))
    return durations


def estimate_pace(
    running: Sequence[ProgressUpdate], durations: Sequence[float], missing: int
) -> dict[str, float | None]:
    """Estimate the pace of a sweep.

    Args:
        running: The progress of the trials that run now.
        durations: Seconds that finished trials took. Without any, those that the running
            trainings foresee.
        missing: Number of trials that are still to be started.

    Returns:
        ``tokens_per_second`` of all running trainings together, None if none reports;
        ``trials_per_hour`` at the present number of running trials, None if nothing runs or
        nothing is known of durations; and ``seconds_left`` at that pace.
    """
    rates = [state["tokens_per_second"] for state in running if state.get("tokens_per_second")]
    pace = {"tokens_per_second": float(sum(rates)) if rates else None}
    durations = durations or [
        state["seconds_left"] * state["steps"] / (state["steps"] - state["step"])
        for state in running
        if state.get("seconds_left") and state.get("steps", 0) > state.get("step", 0)
    ]
    if not durations or not running:
        return {**pace, "trials_per_hour": None, "seconds_left": None}
    duration = mean(durations)
    left = [min(state.get("seconds_left") or duration / 2, duration) for state in running]
    seconds_left = (missing * duration + sum(left)) / len(running)
    return {
        **pace, "trials_per_hour": len(running) * 3600 / duration, "seconds_left": seconds_left
    }  # fmt: skip
