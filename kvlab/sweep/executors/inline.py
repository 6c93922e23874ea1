"""Runs trials one after the other in this process: no Ray, and a debugger works."""

from collections.abc import Callable, Iterable

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors.capacity import cpu_count
from kvlab.sweep.executors.executor import EndedTask, RunTask
from kvlab.trial.task import Task


class InlineExecutor:
    """Holds one trial; `wait` is what runs it, in the calling thread."""

    def __init__(self, run: RunTask):
        self._run = run
        self._next: Task | None = None

    def describe(self) -> str:
        return "this process, one trial at a time"

    def check(self, requests: Iterable[ResourcesConfig]) -> None:
        cores, devices = cpu_count(), None
        for request in requests:
            if request.cpus > cores:
                text = f"resources.cpus = {request.cpus:g}, and this machine has {cores}"
                raise ResourceError(f"{text}; lower it")
            if request.devices:
                devices = _count_gpus() if devices is None else devices
                if request.devices > devices:
                    text = f"resources.gpus = {request.devices:g}, and this machine has {devices}"
                    raise ResourceError(f"{text}; lower it")

    def has_room(self, resources: ResourcesConfig) -> bool:  # noqa: ARG002 (the contract's)
        return self._next is None

    def start(self, task: Task) -> None:
        assert self._next is None, "one task at a time"
        self._next = task

    def wait(self, seconds: float) -> list[EndedTask]:  # noqa: ARG002 (ends when the task does)
        if self._next is None:
            return []
        task, self._next = self._next, None
        try:
            return [EndedTask(task.id, outcome=self._run(task))]
        except Exception as error:
            return [EndedTask(task.id, error=error)]

    def on_every_machine(
        self, task: Callable[[str], str], argument: str
    ) -> dict[str, str | Exception]:
        try:
            return {"this machine": task(argument)}
        except Exception as error:
            return {"this machine": error}

    def close(self, *, force: bool = False) -> None:  # noqa: ARG002 (nothing runs between waits)
        self._next = None


def _count_gpus() -> int:
    import torch  # only for trials that want a GPU, and those will need it here anyway

    return torch.cuda.device_count()
