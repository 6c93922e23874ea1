"""Compare the predicted memory of trainings with that of machines, before anything starts.

To the prediction belongs the process of a trial (`process_bytes`). It is within three tenths of
what is measured, and a training that runs out of memory is
retried with a smaller microbatch. So a training is refused only if it cannot fit even then; if it
is merely likely to run out of memory, that is reported.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import ResourceError
from kvlab.humanize import format_bytes
from kvlab.layout import training_peak_bytes
from kvlab.layout.training_memory import process_bytes
from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.sweep.executors.capacity import cpu_count
from kvlab.sweep.planning.planner import PlannedTrial

LOWER_BOUND_FACTOR = 0.75
"""Of the prediction: no measured training took less."""

_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MachineMemory:
    """The memory of one machine.

    Attributes:
        host: Bytes of its own memory.
        device: Bytes of its largest GPU; 0 without one.
        cores: Number of CPU cores.
    """

    host: int
    device: int
    cores: int

    def at_once(self, resources: ResourcesConfig) -> int:
        """Return how many trials with these resources share the memory that they train in."""
        if resources.devices:
            return max(1, int(1 / resources.devices + 1e-6))
        return max(1, int(self.cores / resources.cpus + 1e-6))


def host_memory() -> int:
    """Return the bytes that this machine's processes may use: in a container fewer than it has."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def device_memory() -> int:
    """Return the bytes of the largest GPU of this machine; 0 if NVIDIA's library knows none."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no library, or no driver
        return 0
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        sizes = (int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        return max(sizes, default=0)
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def measure_machine_memory(_: str = "") -> str:
    """Return the `MachineMemory` of this machine as JSON, without importing torch.

    The argument is not used: an executor runs functions of one string on its machines.
    """
    return json.dumps({"host": host_memory(), "device": device_memory(), "cores": cpu_count()})


def check_memory(
    missing: Iterable[PlannedTrial], machines: Iterable[MachineMemory], one_at_a_time: bool
) -> Iterator[str]:
    """Yield a line for each request whose trainings are likely to run out of memory.

    Args:
        missing: Trials that are to run.
        machines: Any of which may run them.
        one_at_a_time: Whether one trial runs at a time.

    Raises:
        ResourceError: A training cannot fit, however small its microbatch.
    """
    machines, reported = list(machines), set()
    for planned in missing:
        experiment = planned.trial.experiment
        on_device, overhead = experiment.resources.devices > 0, process_bytes(experiment)
        memory = max((m.device if on_device else m.host for m in machines), default=0)
        if not planned.trains or not memory:
            continue
        _check_fits(planned, memory)
        count = 1 if one_at_a_time else min(m.at_once(experiment.resources) for m in machines)
        peak = overhead + training_peak_bytes(experiment, max(1, memory - overhead))
        if peak * count > memory and experiment.resources not in reported:
            reported.add(experiment.resources)
            yield _warning(planned, peak, count, memory)


def _check_fits(planned: PlannedTrial, memory: int) -> None:
    """Raise ResourceError if a training takes more than the memory even at its smallest."""
    experiment = planned.trial.experiment
    smallest = planned.with_resources(microbatch_tokens=experiment.model.block_size)
    tensors = training_peak_bytes(smallest.trial.experiment)
    needed = LOWER_BOUND_FACTOR * (tensors + process_bytes(experiment))
    if needed > memory:
        text = f"{_trial_name(planned)} cannot be trained here: at least {format_bytes(needed)} of"
        text = f"{text} memory, even at one row of {experiment.model.block_size} tokens at once"
        text = f"{text}, and {_owner(experiment)} has {format_bytes(memory)}"
        raise ResourceError(f"{text}; use a smaller model or a larger machine")


def _warning(planned: PlannedTrial, peak: int, count: int, memory: int) -> str:
    experiment = planned.trial.experiment
    text = f"{_trial_name(planned)} is predicted to take {format_bytes(peak)}"
    hint = "lower resources.microbatch_tokens"
    if count > 1:
        text += f", and {count} such trials at once {format_bytes(peak * count)}"
        field = "gpus" if experiment.resources.devices else "cpus"
        hint += f" or raise resources.{field} so that fewer run at once"
    has = f"{format_bytes(memory)} that {_owner(experiment)} has"
    return f"memory may run out: {text}, of {has}; {hint}"


def _owner(experiment: Experiment) -> str:
    return "a GPU" if experiment.resources.devices else "the largest machine"


def _trial_name(planned: PlannedTrial) -> str:
    return f"trial {planned.trial.id[:8]} ({planned.label})"
