"""The parts of `kvlab bench` on small models: what they count, and what they leave out."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from itertools import groupby

import psutil
import pytest
import torch

from kvlab.benchmark import ceilings as ceilings_module
from kvlab.benchmark.ceilings import ceilings
from kvlab.benchmark.measurement import PartName
from kvlab.benchmark.noise import Noise, NoiseWatch
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.parts import PARTS, energy, limit, memory, projection, roofline, task
from kvlab.benchmark.parts.task import book_tokens
from kvlab.benchmark.rule import StopRule
from kvlab.benchmark.session import Session, Settings, Variant
from kvlab.errors import DataError
from kvlab.layout.roofline import Ceilings
from kvlab.model import GPT
from kvlab.report.benchmark_plots import curves
from kvlab.spec import ModelConfig, ServingConfig

SHAPE = {"vocab_size": 257, "block_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 16}
DEVICE = Ceilings("made", "float32", 1, bandwidth=1e9, flops=1e10)


def session(text=None, **settings):
    model = GPT(ModelConfig(**SHAPE)).eval()
    narrow = GPT(ModelConfig(**SHAPE, n_kv_head=1)).eval()
    asked = {"prompt_tokens": 8, "new_tokens": 4, "contexts": (8,), "batches": (1, 2), **settings}
    said = []
    made = Session(
        [
            Variant("wide", model, ServingConfig(), "bytes"),
            Variant("narrow", narrow, ServingConfig(tie="adjacent:2"), "bytes"),
        ],
        Settings(**({"rule": StopRule(least=2, most=2)} | asked), text=text),
        say=said.append,
        _ceilings={"float32": DEVICE},
    )
    return made, said


def by_metric(lines, variant, **place):
    return {
        line.metric: line
        for line in lines
        if line.variant == variant and all(getattr(line, k) == v for k, v in place.items())
    }


def test_every_part_can_be_imported_and_has_a_name_in_the_schema():
    assert set(PARTS) == set(PartName.__args__)
    assert all(callable(import_module(module).measure) for module, _ in PARTS.values())


def test_memory_is_split_into_what_it_holds():
    lines = list(memory.measure(session()[0]))
    found = by_metric(lines, "narrow", cached=True)
    kv = 512 * 2 * 8 * 4  # one slot of one head
    assert found["kv_formula"].value == found["kv_storage"].value == kv
    assert found["kv_read"].value == 2 * kv, "both layers read it"
    for cached in (True, False):
        peak = by_metric(lines, "wide", cached=cached)
        parts = ("peak_weights", "peak_cache", "peak_logits", "peak_activations")
        assert peak["peak"].value == sum(peak[name].value for name in parts)
    assert by_metric(lines, "wide", cached=True)["peak_cache"].value == 12 * 2 * 2 * 16 * 4


def test_use_of_the_ceilings_follows_from_bytes_and_time():
    lines = list(roofline.measure(session()[0]))
    point = by_metric(lines, "wide", batch_size=2)
    seconds = point["step_measured"].value
    read = point["step_weight_bytes"].value + point["step_kv_read_bytes"].value
    assert point["mbu"].value == pytest.approx(read / seconds / 1e9)
    assert point["mfu"].value == pytest.approx(point["step_flops"].value / seconds / 1e10)
    assert point["step_kv_read_bytes"].value == 2 * 2 * 10 * 2 * 16 * 4, "the middle step's"
    longer = max(
        (read + point["step_kv_written_bytes"].value) / 1e9, point["step_flops"].value / 1e10
    )
    assert point["step_predicted"].value == pytest.approx(longer)
    assert {line.metric for line in lines if line.against == "wide"} == {
        "break_even_context",
        "break_even_batch",
    }


def test_ceilings_that_are_beaten_are_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(ceilings_module, "SECONDS", 0.01)
    made, _ = session()
    made._ceilings["float32"] = Ceilings("made", "float32", 1, bandwidth=1.0, flops=1e30)
    assert all(point.efficiency < 1000 for point in roofline.points(made))
    assert made.ceilings("float32").bandwidth > 1e8
    assert made.ceilings("float32").flops == 1e30, "the higher of each is kept"


def test_a_projection_spans_the_efficiencies_that_were_measured():
    made, _ = session()
    measured = [point.efficiency for point in roofline.points(made)]
    line = next(
        line
        for line in projection.measure(made)
        if line.metric == "projected_step" and line.against == "gpt3-175b"
    )
    floor = line.low * max(measured)
    assert line.high == pytest.approx(floor / min(measured))
    assert line.low <= line.value <= line.high
    assert floor * 1e9 > 4 * 174e9, "all weights are read once"


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Call me\nIshmael.\n\n\n  Some years ago\n" + "never mind how long\n" * 40)
    return path


def test_a_book_is_joined_into_lines(book):
    ids = book_tokens(book, "bytes")
    assert bytes(ids).decode().startswith("Call me Ishmael.\nSome years ago never mind how long n")


def test_what_gutenberg_puts_around_a_book_is_left_out(book):
    ids = book_tokens(book, "bytes")
    frame = "Title\n*** START OF THE BOOK ***\n{}\n*** END OF THE BOOK ***\nLicence\n"
    book.write_text(frame.format(book.read_text()))
    assert book_tokens(book, "bytes") == ids


def test_the_task_is_256_and_256_and_the_best_batch_wins(book):
    made, _ = session(text=book)
    made.variants.pop()
    lines = list(task.measure(made))
    rates = [line for line in lines if line.metric == "tasks_per_second" and line.variant == "wide"]
    assert [(line.cached, line.batch_size) for line in rates] == [(False, 1), (True, 1), (True, 2)]
    assert {line.context_length for line in rates} == {512}
    best = by_metric(lines, "wide")["best_tasks_per_second"]
    assert best.value == max(line.value for line in rates if line.cached)


def test_the_task_runs_in_every_dtype_and_is_drawn_over_the_batch(book):
    made, _ = session(text=book, batches=(1, 2))
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    made.variants[:] = [
        Variant(str(kind), GPT(ModelConfig(**SHAPE), dtype=kind).eval(), ServingConfig(), "bytes")
        for kind in kinds
    ]
    lines = list(task.measure(made))
    assert {line.dtype for line in lines} == {"float32", "float16", "bfloat16"}
    for kind in kinds:
        assert by_metric(lines, str(kind), cached=False)["tasks_per_second"].value > 0
        assert by_metric(lines, str(kind), cached=True)["best_tasks_per_second"].value > 0
    (drawn,) = curves([line.model_dump() for line in lines])
    assert drawn.name == "tasks-by-batch"
    assert len(drawn.plot.layers) == 3, "a line a dtype"


def test_a_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Call me Ishmael.")
    with pytest.raises(DataError, match="has 16 tokens; the task needs over 256"):
        book_tokens(path, "bytes")
    with pytest.raises(DataError, match="cannot be read"):
        book_tokens(tmp_path / "none.txt", "bytes")


@pytest.mark.parametrize(
    ("part", "said"), [(task, "gutenberg.org/ebooks/2701"), (limit, "--memory 8GiB")]
)
def test_what_is_left_out_is_said(part, said):
    made, told = session()
    assert list(part.measure(made)) == []
    assert said in told[0]


def test_weights_that_do_not_fit_leave_room_for_no_batch():
    made, _ = session(memory=2_000_000)
    model = GPT(ModelConfig(**{**SHAPE, "n_embd": 256})).eval()
    made.variants[:] = [Variant("wide", model, ServingConfig())]
    tried, formula = limit.measure(made)
    assert (tried.value, formula.value) == (0, 0), "the weights alone are over 6 MB"
    assert tried.note == "2,000,000 bytes given"
    assert made.largest == {"wide": 0}, "for the task"


def test_ceilings_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(ceilings_module, "_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(ceilings_module, "_SIDE", {"cpu": 64})
    monkeypatch.setattr(ceilings_module, "SECONDS", 0.01)
    first = ceilings(torch.device("cpu"), "float32")
    assert first.bandwidth > 1e8
    assert first.flops > 1e6
    assert first.product_bandwidth > 1e7
    (kept,) = (tmp_path / "ceilings").iterdir()
    changed = json.loads(kept.read_text()) | {"bandwidth": 7.0}
    kept.write_text(json.dumps(changed))
    assert ceilings(torch.device("cpu"), "float32").bandwidth == 7.0
    kept.write_text("{")
    assert ceilings(torch.device("cpu"), "float32").bandwidth > 1e8, "a damaged file is made again"
    kept.write_text(json.dumps(changed))
    assert ceilings(torch.device("cpu"), "float32", again=True).bandwidth > 1e8


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
    monkeypatch.setattr(energy, "LEAST_SECONDS", 0.0)
    made, said = session(rule=StopRule(least=5, most=5))
    made.nvml = Nvml(Counter(24_000), None)
    lines = list(energy.measure(made))
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
    monkeypatch.setattr(energy, "LEAST_SECONDS", 0.0)
    made, _ = session(batches=(1,))
    made.nvml, order = Nvml(Counter(1), None), []
    for variant in made.variants:
        width = variant.model.config.n_kv_head
        decode = variant.model.hidden
        variant.model.hidden = lambda *a, _d=decode, _w=width, **k: order.append(_w) or _d(*a, **k)
    list(energy.measure(made))
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
