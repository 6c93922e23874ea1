"""The contract of an executor: run tasks with resources, and own none of kvlab's state.

Retries, the order of trials and the meaning of a failure are the driver's. An executor says when a
task can start, starts it, and says how it ended.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvlab.spec import ResourcesConfig
from kvlab.trial.run import Task

WAIT_SECONDS = 0.5

RunTask = Callable[[Task], Any]
"""Run one task, as `kvlab.trial.run.run_task` does for one store."""


@dataclass(frozen=True)
class EndedTask:
    """How a task ended: with an outcome, or with the error that kept it from one.

    Attributes:
        task_id: Of the trial or another task.
        outcome: What the run returned, of a trial an `Outcome`.
        error: `kvlab.errors.WorkerKilled` if its process died, by a signal or with its machine; a
            ``MemoryError`` if the machine's memory ran out; or what the run itself raised.
    """

    task_id: str
    outcome: Any = None
    error: BaseException | None = None


class Executor(Protocol):
    """Run tasks. All methods are called by the driver's thread."""

    def describe(self) -> str:
        """Return one line for people: which machine or cluster, and its size."""

    def check_requests(self, requests: Iterable[ResourcesConfig]) -> None:
        """Raise ResourceError if a request could never be met here."""

    def has_room(self, resources: ResourcesConfig) -> bool:
        """Return whether a task with these resources would start now."""

    def start(self, task: Task) -> None:
        """Start a task. Only called if there is room."""

    def wait(self, seconds: float) -> list[EndedTask]:
        """Return the tasks that have ended; wait up to ``seconds`` for the first."""

    def run_on_all_machines(self, function: Callable[[str], Any], argument: str) -> dict[str, Any]:
        """Call ``function(argument)`` on each machine that tasks may run on.

        Args:
            function: Of an installed module.

        Returns:
            The result or the error by machine, named for people.
        """

    def close(self, *, force: bool = False) -> None:
        """Release the machines. ``force`` ends running tasks at once."""


def run_tasks(
    executor: Executor, tasks: Iterable[Task], check_stop: Callable[[], None]
) -> Iterator[EndedTask]:
    """Run tasks on an executor on which nothing else runs, and yield each as it ends.

    Args:
        check_stop: Called before every start; those that run end by themselves.
    """
    waiting, running = deque(tasks), 0
    while waiting or running:
        if waiting:
            check_stop()
        while waiting and executor.has_room(waiting[0].resources):
            executor.start(waiting.popleft())
            running += 1
        if not running:  # others use the machines
            time.sleep(WAIT_SECONDS)
        for ended in executor.wait(WAIT_SECONDS):
            running -= 1
            yield ended
