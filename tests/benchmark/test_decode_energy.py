"""Energy and noise: what NVIDIA's library tells, and what others use of the machine."""

import os
import shutil
import subprocess
import sys
import time
from itertools import groupby

import psutil
import pytest

from kvlab.benchmark.interleaving import Noise, NoiseWatch
from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.measures import decode_energy
from kvlab.benchmark.nvml import Nvml
from tests.benchmark.test_measures import by_metric, session


def test_noise_counts_what_others_use():
    assert Noise(0.05).note == ""
    assert Noise(0.5).note == "other processes used 50% of this machine's cores"
    assert Noise(0.0, 1).note == "another process computed on this GPU"
    watch, began = NoiseWatch(), time.monotonic()
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    seconds = watch.noise().others * (time.monotonic() - began) * psutil.cpu_count()
    assert seconds > 0.5, "what the child used, whatever else ran"


class Counter:
    """NVML's functions with a counter that moves by ``each`` millijoules a look, and processes
    that use the GPU."""

    def __init__(self, each=0, uses=()):
        self.each, self.count, self.uses = each, 0, uses

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle, energy):
        self.count += self.each
        energy._obj.value = self.count
        return 0

    def nvmlDeviceGetProcessUtilization(self, _handle, found, count, since):
        later = [use for use in self.uses if use[1] > since.value]
        count._obj.value = len(later)
        for place, (pid, moment, share) in enumerate(later if found else ()):
            found[place].pid, found[place].moment, found[place].sm = pid, moment, share
        return 0 if found else 7


def test_joules_are_shared_among_the_tokens_that_were_decoded(monkeypatch):
    """Each turn looks twice, 24 J apart, and decodes once: batch x 4 tokens."""
    monkeypatch.setattr(decode_energy, "MIN_TURN_SECONDS", 0.0)
    made, said = session(rule=StopRule(least=5, most=5))
    made.nvml = Nvml(Counter(24_000), None)
    lines = list(decode_energy.measure(made))
    assert said == []
    found = {(x.variant, x.batch_size): x for x in lines if x.metric == "joules_per_token"}
    assert {place: x.value for place, x in found.items()} == {
        ("wide", 1): 6.0, ("narrow", 1): 6.0, ("wide", 2): 3.0, ("narrow", 2): 3.0,
    }  # fmt: skip
    one = found["wide", 1]
    assert (one.low, one.high, one.rounds, one.relative_error) == (6.0, 6.0, 5, 0.0)
    ratio = by_metric(lines, "narrow", batch_size=2)["joules_ratio"]
    assert (ratio.value, ratio.verdict, ratio.against) == (1.0, "same", "wide")


def test_energy_is_measured_in_turns(monkeypatch):
    monkeypatch.setattr(decode_energy, "MIN_TURN_SECONDS", 0.0)
    made, _ = session(batches=(1,))
    made.nvml, order = Nvml(Counter(1), None), []
    for variant in made.variants:
        width = variant.model.config.n_kv_head
        decode = variant.model.hidden_states
        variant.model.hidden_states = lambda *a, _d=decode, _w=width, **k: (
            order.append(_w) or _d(*a, **k)
        )
    list(decode_energy.measure(made))
    turns = [width for width, _ in groupby(order)]
    assert turns == [2, 1, 2, 1, 2], "A and B warm up, then A B, B A"


def test_others_on_the_gpu_are_noise():
    mine = os.getpid()
    library = Counter(uses=[(mine, 5, 90), (77, 5, 80)])
    watch = NoiseWatch(Nvml(library, None))
    assert watch.noise().on_gpu == 0, "what was before does not count"
    library.uses = [(mine, 6, 90), (77, 7, 80), (78, 7, 2), (79, 8, 40)]
    assert watch.noise().on_gpu == 2, "one of them hardly did anything"
    library.uses = [(4001, 9, 90), (4002, 9, 80)]
    assert watch.noise().on_gpu == 1, "this process goes by another number"
    assert "computed on this GPU" in watch.noise().note


FAKE_NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
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


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_energy_is_read_from_the_library(tmp_path):
    source, library = tmp_path / "nvml.c", tmp_path / "libfake.so"
    source.write_text(FAKE_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert Nvml.open("GPU-1", str(library)).joules() == 5000000000.123
    assert Nvml.open("GPU-2", str(library)) is None
    assert Nvml.open("GPU-1", str(tmp_path / "none.so")) is None
