"""The contract of an executor: it runs functions with resources, and owns none of our state.

Retries, the order of trials and what a failure means are the driver's. An executor says when a
trial can start, starts it, and tells how it ended.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvlab.spec import ResourcesConfig
from kvlab.trial.run import Outcome
from kvlab.trial.task import Task

RunTask = Callable[[Task], Outcome]
"""Run one task and record it, as `kvlab.trial.task.run_task` does for one store."""


class WorkerKilled(Exception):
    """The process of a trial died under it: a signal, a lost machine."""


@dataclass(frozen=True)
class EndedTask:
    """How a start ended: with an outcome, or with the error that kept the trial from one.

    ``error`` is `WorkerKilled`, a ``MemoryError`` if the machine's memory ran out, or what the
    run itself raised.
    """

    task_id: str
    outcome: Outcome | None = None
    error: BaseException | None = None


class Executor(Protocol):
    """Runs trials. Used by one thread, the driver's."""

    def describe(self) -> str:
        """One line for people: which machine or cluster, and how large."""
        ...

    def check(self, requests: Iterable[ResourcesConfig]) -> None:
        """Raises ResourceError if some request could never be met here."""
        ...

    def has_room(self, resources: ResourcesConfig) -> bool:
        """Whether a trial with these resources would start now."""
        ...

    def start(self, task: Task) -> None:
        """Start a task; only when there is room."""
        ...

    def wait(self, seconds: float) -> list[EndedTask]:
        """The trials that have ended; waits up to ``seconds`` for the first."""
        ...

    def on_every_machine(
        self, task: Callable[[str], str], argument: str
    ) -> dict[str, str | Exception]:
        """What ``task(argument)`` gives, or raises, on each machine that trials may run on.

        The machines' names are for people. The task is a function of an installed module.
        """
        ...

    def close(self, *, force: bool = False) -> None:
        """Lets go of the machine; ``force`` ends running trials at once."""
        ...
