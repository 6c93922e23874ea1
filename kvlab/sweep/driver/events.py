"""What a driver exchanges with its caller: events, a source of more trials, the final summary."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
            at a rung of a search, ``elsewhere`` if another process runs it.
        seconds: Of ``ended``: how long it ran.
        message: Of ``retried``, ``halted`` and ``waiting``: the reason; of ``healed``, what.
        is_remote: Whether another process has ended it.
    """

    kind: Literal["started", "ended", "retried", "healed", "halted", "waiting"]
    planned: PlannedTrial
    status: str = ""
    seconds: float = 0.0
    message: str = ""
    is_remote: bool = False


class TrialSource(Protocol):
    """Supply a driver with more trials while it runs, as a search does.

    All methods are called by the driver's thread.

    Attributes:
        stop_reason: Why there will be no more trials; empty as long as there may be.
    """

    stop_reason: str

    def ask(self) -> PlannedTrial | None:
        """Return one more trial, which may have ended before; None if there is none for now."""
        ...

    def tell(self, planned: PlannedTrial, status: str) -> None:
        """Take how a trial ended. Trials of another source are ignored."""
        ...

    def resume_or_prune(self, planned: PlannedTrial) -> PlannedTrial | None:
        """Decide about a trial that has reached the step at which it was to pause.

        Returns:
            The trial with its next ``until``, to go on; None if it is pruned for now. `ask` may
            return it again.
        """
        ...


@dataclass
class Summary:
    """The state of a sweep after a driver's run.

    Attributes:
        states: Number of trials by how they ended: ``done``, ``failed``, ``diverged``,
            ``pruned``, or ``missing``.
        trials_run: Number of trials that ended in this run, in this driver.
        seconds: Duration of the run.
        stopped: Whether the driver was asked to stop.
        halt_reason: Why the driver gave up before the end, if it did.
        has_more: Whether the source of trials was to supply more, or a stage was to follow.
    """

    states: Counter[str] = field(default_factory=Counter)
    trials_run: int = 0
    seconds: float = 0.0
    stopped: bool = False
    halt_reason: str = ""
    has_more: bool = False

    @property
    def exit_code(self) -> int:
        """0 if all trials ended without a failure, 1 if some failed, 130 if stopped early."""
        if self.stopped and (self.states["missing"] or self.has_more):
            return 130
        return 1 if self.states["failed"] or self.states["missing"] else 0
