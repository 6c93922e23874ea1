"""The memory check, with machines given as numbers."""

import json
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from kvlab.errors import ResourceError
from kvlab.layout import training_peak_bytes
from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.layout.training_memory import CPU_PROCESS_BYTES
from kvlab.sweep.planning.budget import (
    LOWER_BOUND_FACTOR,
    MachineMemory,
    check_memory,
    host_memory,
    measure_machine_memory,
)
from tests.support.stub_trials import tiny_plan

ONE = """\
question: q
experiment: e.yaml
factors:
  width:
    base: {model.n_embd: 64, model.block_size: 16, training.batch_tokens: 256, training.tokens: 512%s}
"""


def planned(tmp_path, resources="cpus: 1.0"):
    resources = f", resources.{resources}, resources.microbatch_tokens: 256"
    return tiny_plan(tmp_path, text=ONE % resources).trials


def peaks(trials):
    """Return the predicted bytes at the requested microbatch, and at one row, with a process."""
    experiment = trials[0].trial.experiment
    smallest = experiment.resources.model_copy(update={"microbatch_tokens": 16})
    least = experiment.model_copy(update={"resources": smallest})
    own = CONTEXT_BYTES if experiment.resources.devices else CPU_PROCESS_BYTES
    return training_peak_bytes(experiment) + own, training_peak_bytes(least) + own


def lines(trials, *machines, alone=False):
    return list(check_memory(trials, [MachineMemory(*one) for one in machines], alone))


def test_what_cannot_fit_at_any_microbatch_is_refused_and_what_might_is_warned_of(tmp_path):
    trials = planned(tmp_path)
    peak, least = peaks(trials)
    assert peak > least
    assert lines(trials, (peak, 0, 1)) == []
    [line] = lines(trials, (peak - 1, 0, 1))
    assert "memory may run out" in line
    assert "lower resources.microbatch_tokens" in line
    assert len(lines(trials, (int(LOWER_BOUND_FACTOR * least) + 1, 0, 1))) == 1
    too_small = (int(LOWER_BOUND_FACTOR * least) - 1, 0, 1)
    with pytest.raises(ResourceError, match=r"cannot be trained here.*one row of 16 tokens"):
        lines(trials, too_small)
    assert lines(trials, too_small, (2 * peak, 0, 1)) == [], "the largest machine decides"
    assert lines(trials) == [], "none has answered"
    assert lines([one for one in trials if not one.trains], too_small) == []


def test_trials_that_run_at_once_share_the_memory(tmp_path):
    trials = planned(tmp_path)
    machine = (3 * peaks(trials)[0], 0, 4)
    [line] = lines(trials, machine)
    assert "4 such trials at once" in line
    assert "raise resources.cpus so that fewer run at once" in line
    assert lines(trials, machine, alone=True) == []
    assert lines(planned(tmp_path, "cpus: 2.0"), machine) == []


def test_a_gpu_has_its_own_memory_less_what_a_process_takes_anyway(tmp_path):
    trials = planned(tmp_path, "gpus: 1.0")
    peak, least = peaks(trials)
    assert lines(trials, (1, peak, 1)) == []
    with pytest.raises(ResourceError, match="and a GPU has"):
        lines(trials, (10**15, int(LOWER_BOUND_FACTOR * least) - 1, 1), alone=True)
    assert lines(trials, (1, 0, 1)) == []  # not known
    [line] = lines(planned(tmp_path, "gpus: 0.25"), (1, peak, 1))
    assert "4 such trials at once" in line
    assert "raise resources.gpus" in line


def test_a_machine_says_what_it_has(monkeypatch):
    sizes = [81559 * 2**20, 143771 * 2**20]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(sizes))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    memory = lambda index: SimpleNamespace(total=sizes[index])  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    machine = MachineMemory(**json.loads(measure_machine_memory()))
    assert machine.device == 143771 * 2**20
    assert 0 < machine.host == host_memory() <= psutil.virtual_memory().total
    assert machine.cores >= 1
