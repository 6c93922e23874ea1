"""Energy and noise: what NVML reports, and what other processes use of the machine."""

import os
import shutil
import subprocess
import sys
import time
from itertools import groupby
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from kvlab.benchmark import decode_timing
from kvlab.benchmark.device_peaks import needed_cores
from kvlab.benchmark.interleaving import Noise, NoiseWatch
from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.measures import decode_energy
from kvlab.benchmark.nvml import Nvml
from kvlab.model.generate import EagerDecoder
from tests.benchmark.sessions import lines_by_metric, make_session


def test_noise_counts_what_others_use():
    assert Noise(0.05).note == ""
    assert Noise(0.5).note == "other processes used 50% of this machine's cores"
    assert Noise(0.0, 1).note == "another process computed on this GPU"
    watch, start = NoiseWatch(), time.monotonic()
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    seconds = watch.read_noise().cpu_share * (time.monotonic() - start) * psutil.cpu_count()
    assert seconds > 0.5, "what the child used, whatever else ran"


def test_beside_a_gpu_only_the_cores_that_the_work_needs_have_to_be_free(monkeypatch):
    """Of 16 cores others use 8, then 15.5: the last is too much, and on CPU half is."""
    times = SimpleNamespace(user=0.0, system=0.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    monkeypatch.setattr("kvlab.benchmark.interleaving.time.monotonic", lambda: times.user / used)
    for used, needed, is_noisy in ((8.0, 1, False), (15.5, 1, True), (8.0, None, True)):
        times.user = 0.0
        watch = NoiseWatch(None, needed)
        times.user += 10 * used
        assert bool(watch.read_noise().note) == is_noisy


def test_work_on_a_gpu_needs_few_cores_however_many_threads_there_are(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert needed_cores(torch.device("cuda")) == 2
    assert needed_cores(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert needed_cores(torch.device("cuda")) == 1


class FakeDriver:
    """NVML's functions, with a counter that grows by ``step`` millijoules per reading, and
    processes that use the GPU: (pid, time, percent)."""

    def __init__(self, monkeypatch, step=0, uses=()):
        self.step, self.count, self.uses = step, 0, uses
        for name in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetProcessUtilization"):
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle):
        self.count += self.step
        return self.count

    def nvmlDeviceGetProcessUtilization(self, _handle, since):
        later = [use for use in self.uses if use[1] > since]
        if not later:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(pid=pid, timeStamp=stamp, smUtil=sm) for pid, stamp, sm in later]


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(decode_energy, "MIN_TURN_SECONDS", 0.0)


def test_joules_are_shared_among_the_tokens_that_were_decoded(monkeypatch):
    """Each turn reads twice, 24 J apart, and decodes once: batch x 4 tokens."""
    made, notices = make_session(stop_rule=StopRule(min_rounds=5, max_rounds=5))
    FakeDriver(monkeypatch, step=24_000)
    made.nvml = Nvml(None)
    lines = list(decode_energy.measure(made))
    assert notices == []
    joules = {(x.variant, x.batch_size): x for x in lines if x.metric == "joules_per_token"}
    assert {key: x.value for key, x in joules.items()} == {
        ("wide", 1): 6.0, ("narrow", 1): 6.0, ("wide", 2): 3.0, ("narrow", 2): 3.0,
    }  # fmt: skip
    line = joules["wide", 1]
    assert (line.low, line.high, line.rounds, line.relative_error) == (6.0, 6.0, 5, 0.0)
    ratio = lines_by_metric(lines, "narrow", batch_size=2)["joules_ratio"]
    assert (ratio.value, ratio.verdict, ratio.against) == (1.0, "same", "wide")


def test_preparing_a_decode_step_uses_no_energy_of_a_turn(monkeypatch):
    made, _ = make_session(batches=(1,), stop_rule=StopRule(min_rounds=2, max_rounds=2))
    driver = FakeDriver(monkeypatch, step=24_000)
    made.nvml = Nvml(None)

    def prepare(model, cache):
        driver.count += 10**9
        return EagerDecoder(model, cache)

    monkeypatch.setattr(decode_timing, "make_decoder", prepare)
    lines = list(decode_energy.measure(made))
    assert {x.value for x in lines if x.metric == "joules_per_token"} == {6.0}


def test_energy_is_measured_in_turns(monkeypatch):
    FakeDriver(monkeypatch, step=1)
    made, _ = make_session(batches=(1,))
    made.nvml, order = Nvml(None), []
    for variant in made.variants:
        heads, hidden = variant.model.config.n_kv_head, variant.model.hidden_states
        variant.model.hidden_states = lambda *a, _h=hidden, _n=heads, **k: (
            order.append(_n) or _h(*a, **k)
        )
    list(decode_energy.measure(made))
    turns = [heads for heads, _ in groupby(order)]
    assert turns == [2, 1, 2, 1, 2], "A and B warm up, then A B, B A"


def test_a_device_without_a_counter_is_left_out(monkeypatch):
    def unsupported(_handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", unsupported)
    made, notices = make_session()
    made.nvml = Nvml(None)
    assert list(decode_energy.measure(made)) == []
    assert "energy is left out" in notices[0]


def test_other_processes_on_the_gpu_are_noise(monkeypatch):
    own = os.getpid()
    driver = FakeDriver(monkeypatch, uses=[(own, 5, 90), (77, 5, 80)])
    watch = NoiseWatch(Nvml(None))
    assert watch.read_noise().gpu_processes == 0, "what ran before does not count"
    driver.uses = [(own, 6, 90), (77, 7, 80), (78, 7, 2), (79, 8, 40)]
    assert watch.read_noise().gpu_processes == 2, "one of them hardly did anything"
    driver.uses = [(4001, 9, 90), (4002, 9, 80)]
    assert watch.read_noise().gpu_processes == 1, "this process has another id there"
    assert "computed on this GPU" in watch.read_noise().note


FAKE_LIBRARY = """
#include <string.h>
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)0x123456789abc;
    return strcmp(uuid, "GPU-1") ? 6 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
    if (device != (void *)0x123456789abc) return 2;
    *energy = 5000000000123ULL;
    return 0;
}
"""

READ = """
from kvlab.benchmark.nvml import Nvml
device = Nvml.open("GPU-1")
print(device and device.read_joules(), Nvml.open("GPU-2"), device and device.read_utilization())
"""


def read_in_new_process(folder):
    """What a process finds whose loader looks for libraries in ``folder`` first."""
    env = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    process = subprocess.run(
        [sys.executable, "-c", READ], env=env, capture_output=True, text=True, check=True
    )
    return process.stdout.strip()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_energy_is_read_from_the_library(tmp_path):
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(FAKE_LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert read_in_new_process(tmp_path) == "5000000000.123 None []"
    library.write_bytes(b"no library")
    assert read_in_new_process(tmp_path) == "None None None"
