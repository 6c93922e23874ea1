"""Memory of machines against what trainings are predicted to take, before anything starts.

The prediction is within three tenths of what is measured, and a training that runs out of memory is
tried again with a smaller microbatch. So refused is only what cannot fit even then; what is
merely likely to run out is said.
"""

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import ResourceError
from kvlab.humanize import format_bytes
from kvlab.layout import training_peak_bytes
from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.sweep.executors.capacity import cpu_count
from kvlab.sweep.planning.planner import PlannedTrial

LOWER_BOUND_FACTOR = 0.75
"""Of the prediction: no training measured took less."""

_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of a machine's own memory, and of its largest GPU (0 without one)."""

    host: int
    device: int
    cores: int

    def at_once(self, resources: ResourcesConfig) -> int:
        """How many trials that ask for ``resources`` share the memory that they train in."""
        if resources.devices:
            return max(1, int(1 / resources.devices + 1e-6))
        return max(1, int(self.cores / resources.cpus + 1e-6))


def host_memory() -> int:
    """Bytes that the processes here may use: fewer than the machine's in a container."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def measure_machine_memory(_: str = "") -> str:
    """A `MachineMemory` of where it is called, as JSON; no torch for it."""
    return json.dumps({"host": host_memory(), "device": _device_memory(), "cores": cpu_count()})


def check_memory(
    missing: Iterable[PlannedTrial], machines: Iterable[MachineMemory], alone: bool
) -> Iterator[str]:
    """Lines about trainings that are likely to run out of memory.

    Args:
        missing: trials that are to run.
        machines: any of which may run them.
        alone: whether one trial runs at a time.

    Raises:
        ResourceError: a training cannot fit, however small its microbatch.
    """
    machines, told = list(machines), set()
    for one in (one for one in missing if one.trains):
        experiment = one.trial.experiment
        least = LOWER_BOUND_FACTOR * training_peak_bytes(_with_one_row_microbatch(experiment))
        most = max((_available_bytes(machine, experiment) for machine in machines), default=0)
        if not most:
            continue
        where = "a GPU" if experiment.resources.devices else "the largest machine"
        if least > most:
            text = f"{_trial_name(one)} cannot be trained here: at least {format_bytes(least)}"
            text = f"{text} of memory, even at one row of {experiment.model.block_size} tokens"
            text = f"{text} at once, and {where}"
            raise ResourceError(
                f"{text} has {format_bytes(most)}; use a smaller model or a larger machine"
            )
        count = 1 if alone else min(m.at_once(experiment.resources) for m in machines)
        peak = training_peak_bytes(experiment, most)
        if peak * count > most and experiment.resources not in told:
            told.add(experiment.resources)
            yield _warning(one, peak, count, most, where)


def _warning(one: PlannedTrial, peak: int, count: int, most: int, where: str) -> str:
    resources = one.trial.experiment.resources
    text = f"{_trial_name(one)} is predicted to take {format_bytes(peak)}"
    if count > 1:
        text += f", and {count} such trials at once {format_bytes(peak * count)}"
    larger = f"raise resources.{'gpus' if resources.devices else 'cpus'} so that fewer run at once"
    way_out = "lower resources.microbatch_tokens" + (f" or {larger}" if count > 1 else "")
    return f"memory may run out: {text}, of {format_bytes(most)} that {where} has; {way_out}"


def _with_one_row_microbatch(experiment: Experiment) -> Experiment:
    """With one row in a microbatch, as failure policies leave it."""
    changed = {"microbatch_tokens": experiment.model.block_size}
    resources = experiment.resources.model_copy(update=changed)
    return experiment.model_copy(update={"resources": resources})


def _available_bytes(machine: MachineMemory, experiment: Experiment) -> int:
    if not experiment.resources.devices:
        return machine.host
    return max(0, machine.device - CONTEXT_BYTES)


def _device_memory() -> int:
    """Bytes of the largest GPU here, by NVIDIA's own command; 0 if that knows none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
        return max((int(line) for line in done.stdout.split()), default=0) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def _trial_name(one: PlannedTrial) -> str:
    return f"trial {one.trial.id[:8]} ({one.label})"
