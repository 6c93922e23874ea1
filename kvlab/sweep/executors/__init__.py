"""The table of executors, by the name that ``--executor`` takes. Each is imported when used.

To add one, write a module with a class that follows `Executor`, a line in `EXECUTORS`, and a test
class that inherits ``tests/contracts/executor_contract.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.sweep.executors.executor import Executor, RunTask
from kvlab.sweep.executors.inline import InlineExecutor


@dataclass(frozen=True)
class ExecutorEntry:
    """One executor of the table.

    Attributes:
        summary: For the help of ``--executor``.
        make: Returns the executor for a run function and the address of a cluster, if any.
        runs_in_process: Whether it runs one task at a time in the driver's process.
        takes_address: Whether it connects to a running cluster.
    """

    summary: str
    make: Callable[[RunTask, str | None], Executor]
    runs_in_process: bool = False
    takes_address: bool = False


def _make_ray(run: RunTask, address: str | None) -> Executor:
    from kvlab.sweep.executors.ray import RayExecutor

    return RayExecutor(run, address)


DEFAULT_EXECUTOR = "ray"

IDLE_EXECUTOR = "inline"
"""Used if nothing is to run, since it starts no cluster."""

EXECUTORS: dict[str, ExecutorEntry] = {
    "ray": ExecutorEntry("several trials at once", _make_ray, takes_address=True),
    "inline": ExecutorEntry(
        "one trial after the other in this process",
        lambda run, _: InlineExecutor(run),
        runs_in_process=True,
    ),
}


def make_executor(name: str, run: RunTask, address: str | None = None) -> Executor:
    """Return the executor of this name; see `ExecutorEntry` for the arguments."""
    entry = EXECUTORS[name]
    assert address is None or entry.takes_address, "only a cluster has an address"
    return entry.make(run, address)
