"""The inline executor: run tasks one after the other in this process, without Ray."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from kvlab.errors import WorkerKilled
from kvlab.machine import cpu_count
from kvlab.spec import ResourcesConfig
from kvlab.store.attempt import stall_seconds
from kvlab.sweep.executors.capacity import KIND, Capacity
from kvlab.sweep.executors.executor import EndedTask, RunTask
from kvlab.trial.run import STALLED_EXIT, Task, end_when_stalled, stop_at_sigterm


class InlineExecutor:
    """Hold one task, and run it in the calling thread in `wait`. A debugger works.

    A task on a GPU has a process of its own: after a fault of the device, all later work in a
    process fails, and a kernel may never end. The process ends itself without progress.

    Args:
        run: Runs one task.
    """

    def __init__(self, run: RunTask):
        self._run = run
        self._task: Task | None = None

    def describe(self) -> str:
        return "this process, one trial at a time"

    def check_requests(self, requests: Iterable[ResourcesConfig]) -> None:
        requests = list(requests)
        machine: dict[str, float] = {"CPU": cpu_count()}
        if any(request.devices for request in requests):
            import torch  # such a trial needs torch in this process anyway

            machine["GPU"] = count = torch.cuda.device_count()
            words = set(re.split("[ -]", torch.cuda.get_device_name() if count else ""))
            words |= {word.removesuffix("B") for word in words}  # Ray says 40G for 40GB
            kinds = {one.accelerator_type for one in requests if one.accelerator_type}
            own = (kind for kind in kinds if words.issuperset(kind.split("-")))
            machine |= dict.fromkeys((f"{KIND}{kind}" for kind in own), 1.0)
        Capacity(lambda: [machine]).check_requests(requests)

    def has_room(self, resources: ResourcesConfig) -> bool:  # noqa: ARG002 (the contract's)
        return self._task is None

    def start(self, task: Task) -> None:
        assert self._task is None, "one task at a time"
        self._task = task

    def wait(self, seconds: float) -> list[EndedTask]:  # noqa: ARG002 (ends when the task does)
        if self._task is None:
            return []
        task, self._task = self._task, None
        try:
            run = self._run_apart if task.resources.devices else self._run
            return [EndedTask(task.id, outcome=run(task))]
        except Exception as error:
            return [EndedTask(task.id, error=error)]

    def _run_apart(self, task: Task) -> Any:
        context = multiprocessing.get_context("spawn")
        answer, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_and_answer, args=(self._run, task, theirs))
        process.start()
        theirs.close()
        try:
            found = answer.recv()
            process.join()
        except EOFError:
            process.join()
            text = f"its process died with exit status {process.exitcode}"
            if process.exitcode == STALLED_EXIT:
                text = f"its process made no progress for {stall_seconds():g} s"
            raise WorkerKilled(text) from None
        finally:
            process.kill()  # after an interrupt
        if isinstance(found, Exception):
            raise found
        return found

    def run_on_all_machines(self, function: Callable[[str], Any], argument: str) -> dict[str, Any]:
        try:
            return {"this machine": function(argument)}
        except Exception as error:
            return {"this machine": error}

    def close(self, *, force: bool = False) -> None:  # noqa: ARG002 (nothing runs between waits)
        self._task = None


def _run_and_answer(run: RunTask, task: Task, answer: Connection) -> None:
    """Run a task, and send its outcome or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver asks its tasks to stop
    for watch in (_end_with_driver, end_when_stalled):
        threading.Thread(target=watch, daemon=True).start()
    try:
        with stop_at_sigterm():  # srun and others send it to every process
            outcome = run(task)
        answer.send(outcome)
    except Exception as error:
        answer.send(error)


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None, "this process was started by it"
    driver.join()
    os._exit(1)
