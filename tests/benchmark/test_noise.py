"""Noise: what other processes use of the machine and, by NVML, of its GPU."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pynvml
import torch

from kvlab.benchmark import interleaving
from kvlab.benchmark.device_peaks import needed_cores
from kvlab.benchmark.interleaving import NoiseWatch


def test_noise_counts_what_others_use(monkeypatch):
    monkeypatch.setattr(interleaving, "MAX_FOREIGN_SHARE", 0.0)  # here may be many cores
    watch, start = NoiseWatch(), time.monotonic()
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    noise, elapsed = watch.read_noise(), time.monotonic() - start
    share = re.fullmatch(r"other processes used (\d+)% of this machine's cores", noise)[1]
    seconds = int(share) / 100 * elapsed * psutil.cpu_count()
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
        assert bool(watch.read_noise()) == is_noisy
    for threads, cores in ((16, 2), (1, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert needed_cores(torch.device("cuda")) == cores
    assert needed_cores(torch.device("cpu")) is None


def test_other_processes_on_the_gpu_are_noise(monkeypatch):
    """NVML has processes that use the GPU: (pid, time, percent)."""
    own = os.getpid()

    def list_uses(_handle, since):
        later = [use for use in uses if use[1] > since]
        if not later:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(pid=pid, timeStamp=stamp, smUtil=sm) for pid, stamp, sm in later]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", list_uses)
    uses = [(own, 5, 90), (77, 5, 80)]
    watch = NoiseWatch("handle", needed_cores=0)

    def gpu_noise():
        return watch.read_noise().rpartition("; ")[2]

    assert gpu_noise() == "", "what ran before does not count"
    uses = [(own, 6, 90), (77, 7, 80), (78, 7, 2), (79, 8, 40)]
    others = "2 other processes computed on this GPU"
    assert gpu_noise() == others, "one of them hardly did anything"
    uses = [(4001, 9, 90), (4002, 9, 80)]
    other = "another process computed on this GPU"
    assert gpu_noise() == other, "this process has another id there"
