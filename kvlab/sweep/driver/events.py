"""What a driver tells those who watch, and how a sweep stands in the end."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvlab.sweep.planning.planner import PlannedTrial

PrepareTrials = Callable[[list[PlannedTrial], Callable[[], None]], list[PlannedTrial]]
"""Prepares what the missing trials share, and may end some of them; its second argument raises
Stopped if it must end. Gives the trials as they are to be run."""


@dataclass(frozen=True)
class Event:
    """Something that people watching would like to know.

    ``seconds`` is how long the trial ran; ``message`` says why it is started again, of a
    ``halted`` sweep why no more trials are started, or what one that is ``waiting`` waits for.
    ``status`` is how one ended, also ``stopped``, ``paused`` at a rung from which it goes on, or
    ``elsewhere``: left to another process. ``elsewhere`` is true of one that another process has
    ended.
    """

    kind: Literal["started", "ended", "retried", "halted", "waiting"]
    planned: PlannedTrial
    status: str = ""
    seconds: float = 0.0
    message: str = ""
    elsewhere: bool = False


@dataclass
class Summary:
    """How a sweep stands after a driver's run.

    ``states`` counts trials by how they ended: done, failed, diverged, pruned, or ``missing``.
    ``halted`` says why the driver gave up before the end, if it did; ``more`` that a search was
    to go on.
    """

    states: Counter[str] = field(default_factory=Counter)
    ran: int = 0
    seconds: float = 0.0
    stopped: bool = False
    halted: str = ""
    more: bool = False

    @property
    def exit_code(self) -> int:
        """0 all ended without a failure, 1 some failed, 130 stopped before the end."""
        if self.stopped and (self.states["missing"] or self.more):
            return 130
        return 1 if self.states["failed"] or self.states["missing"] else 0
