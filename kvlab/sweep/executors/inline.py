"""The inline executor: run tasks one after the other in this process, without Ray."""

from collections.abc import Callable, Iterable

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors.capacity import cpu_count
from kvlab.sweep.executors.executor import EndedTask, RunTask
from kvlab.trial.run import Task


class InlineExecutor:
    """Hold one task, and run it in the calling thread in `wait`. A debugger works.

    Args:
        run: Runs one task.
    """

    def __init__(self, run: RunTask):
        self._run = run
        self._task: Task | None = None

    def describe(self) -> str:
        return "this process, one trial at a time"

    def check_requests(self, requests: Iterable[ResourcesConfig]) -> None:
        for request in requests:
            offers = [("cpus", request.cpus, cpu_count())]
            if request.devices:
                import torch  # such a trial needs torch in this process anyway

                offers.append(("gpus", request.devices, torch.cuda.device_count()))
            for field, needed, here in offers:
                if needed > here:
                    text = f"resources.{field} = {needed:g}, and this machine has {here}"
                    raise ResourceError(f"{text}; lower it")

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
            return [EndedTask(task.id, outcome=self._run(task))]
        except Exception as error:
            return [EndedTask(task.id, error=error)]

    def run_on_all_machines(
        self, function: Callable[[str], str], argument: str
    ) -> dict[str, str | Exception]:
        try:
            return {"this machine": function(argument)}
        except Exception as error:
            return {"this machine": error}

    def close(self, *, force: bool = False) -> None:  # noqa: ARG002 (nothing runs between waits)
        self._task = None
