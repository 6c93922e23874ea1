"""The measures of `kvlab bench` on small models: what they count, and what they leave out."""

import itertools
import json
import platform
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvlab.benchmark import decode_timing, device_peaks
from kvlab.benchmark.device_peaks import load_device_peaks
from kvlab.benchmark.interleaving import NoiseWatch
from kvlab.benchmark.measures import (
    decode_latency,
    decode_memory,
    decode_roofline,
    decode_throughput,
    generation_task,
)
from kvlab.benchmark.measures.generation_task import read_book
from kvlab.benchmark.session import Variant
from kvlab.errors import DataError
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model import GPT
from kvlab.model.generate import make_decoder
from kvlab.spec import ModelConfig, ServingConfig
from tests.benchmark.sessions import PEAKS, SHAPE, lines_by_metric, make_session


def test_memory_is_split_into_what_it_holds():
    lines = list(decode_memory.measure(make_session()[0]))
    metrics = lines_by_metric(lines, "narrow", cached=True)
    kv = 512 * 2 * 8 * 4  # one slot of one head
    assert metrics["kv_formula"].value == metrics["kv_storage"].value == kv
    assert metrics["kv_read"].value == 2 * kv, "both layers read it"
    for cached in (True, False):
        peak = lines_by_metric(lines, "wide", cached=cached)
        parts = ("peak_weights", "peak_cache", "peak_logits", "peak_activations")
        assert peak["peak"].value == sum(peak[name].value for name in parts)
    assert lines_by_metric(lines, "wide", cached=True)["peak_cache"].value == 12 * 2 * 2 * 16 * 4


def test_the_slots_that_a_step_reads_stand_beside_its_time():
    """Of two new tokens after a prompt of 8, both layers read 9 and 10; nothing else is counted."""
    made, _ = make_session()
    lines = [*decode_latency.measure(made), *decode_throughput.measure(made)]
    counted = [line for line in lines if line.read_slots is not None]
    assert {(line.metric, line.batch_size) for line in counted} == {
        ("tpot", 1), ("tokens_per_second", 1), ("tokens_per_second", 2),
    }  # fmt: skip
    for line in counted:
        first = line.context_length - line.new_tokens + 1
        expected = 2 * (first + line.context_length) / 2
        assert line.read_slots == line.used_slots == expected


def test_use_of_the_ceilings_follows_from_bytes_and_time():
    lines = list(decode_roofline.measure(make_session()[0]))
    point = lines_by_metric(lines, "wide", batch_size=2)
    seconds = point["step_measured"].value
    read = point["step_weight_bytes"].value + point["step_kv_read_bytes"].value
    assert point["mbu"].value == pytest.approx(read / seconds / 1e9)
    assert point["mfu"].value == pytest.approx(point["step_flops"].value / seconds / 1e10)
    assert point["step_kv_read_bytes"].value == 2 * 2 * 10 * 2 * 16 * 4, "the middle step's"
    longer = max(
        (read + point["step_kv_written_bytes"].value) / 1e9, point["step_flops"].value / 1e10
    )
    assert point["step_predicted"].value == pytest.approx(longer)


def test_a_step_that_beats_the_ceilings_is_marked():
    made, _ = make_session()
    made.device_peaks["float32"] = DevicePeaks("made", "float32", 1, bandwidth=1.0, flops=1e30)
    metrics = lines_by_metric(decode_roofline.measure(made), "wide", batch_size=2)
    assert metrics["efficiency"].noisy
    assert metrics["efficiency"].note.startswith("faster than the ceilings")


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Call me\nIshmael.\n\n\n  Some years ago\n" + "never mind how long\n" * 40)
    return path


def test_a_book_is_joined_into_lines_without_what_gutenberg_puts_around_it(book):
    ids = read_book(book, "bytes")
    assert bytes(ids).decode().startswith("Call me Ishmael.\nSome years ago never mind how long n")
    frame = "Title\n*** START OF THE BOOK ***\n{}\n*** END OF THE BOOK ***\nLicence\n"
    book.write_text(frame.format(book.read_text()))
    assert read_book(book, "bytes") == ids


def test_a_mac_names_its_processor(monkeypatch):
    """It has no /proc/cpuinfo, and its architecture is that of several processors."""

    def refuse(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(device_peaks, "open", refuse, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    said = iter(["Apple M2 Pro\n", ""])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=next(said)))
    names = [device_peaks.processor_name() for _ in range(2)]
    assert names == ["Apple M2 Pro", platform.machine()]


def test_the_task_is_256_and_256(book):
    made, _ = make_session(text=book)
    made.variants.pop()
    lines = list(generation_task.measure(made))
    rates = [line for line in lines if line.metric == "tasks_per_second" and line.variant == "wide"]
    assert [(line.cached, line.batch_size) for line in rates] == [(False, 1), (True, 1), (True, 2)]
    assert {line.context_length for line in rates} == {512}


def test_a_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Call me Ishmael.")
    with pytest.raises(DataError, match="has 16 tokens; the task needs over 256"):
        read_book(path, "bytes")
    with pytest.raises(DataError, match="cannot be read"):
        read_book(tmp_path / "none.txt", "bytes")


def test_ceilings_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(device_peaks, "BUFFER_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(device_peaks, "MATRIX_SIDE", {"cpu": 64})
    monkeypatch.setattr(device_peaks, "SECONDS_PER_PEAK", 0.01)
    busy = "other processes used 30% of this machine's cores"
    monkeypatch.setattr(NoiseWatch, "read_noise", lambda _self: busy)
    disturbed = load_device_peaks(torch.device("cpu"), "float32")
    assert disturbed.disturbance == busy
    assert not (tmp_path / "ceilings").exists(), "what was measured on a busy machine is not kept"
    monkeypatch.setattr(NoiseWatch, "read_noise", lambda _self: "")
    first = load_device_peaks(torch.device("cpu"), "float32")
    assert first.bandwidth > 1e8
    assert first.flops > 1e6
    assert first.product_bandwidth > 1e7
    (peaks_file,) = (tmp_path / "ceilings").iterdir()
    changed = json.loads(peaks_file.read_text()) | {"bandwidth": 7.0}
    peaks_file.write_text(json.dumps(changed))
    assert load_device_peaks(torch.device("cpu"), "float32").bandwidth == 7.0
    peaks_file.write_text("{")
    assert load_device_peaks(torch.device("cpu"), "float32").bandwidth > 1e8, (
        "a damaged file is made again"
    )
    peaks_file.write_text(json.dumps(changed))
    assert load_device_peaks(torch.device("cpu"), "float32", remeasure=True).bandwidth > 1e8


def prepare_in_30_seconds(model, cache):
    return make_decoder(model, cache), 30.0


def test_preparing_a_decode_step_takes_no_time_of_the_task(monkeypatch):
    """Of 100 seconds 30 were preparation: they stand in a line of their own."""
    made, notices = make_session(batches=(1,), tokens=[1] * 300)
    short = GPT(ModelConfig(**SHAPE | {"block_size": 511})).eval()
    made.variants.append(Variant("short", short, ServingConfig()))
    clock = SimpleNamespace(perf_counter=itertools.count(0, 100).__next__)
    monkeypatch.setattr(generation_task, "time", clock)
    monkeypatch.setattr(generation_task, "time_preparation", prepare_in_30_seconds)
    monkeypatch.setattr(generation_task, "generate", lambda model, *_, prepare, **__: prepare(
        model, model.new_cache(1, 8)))  # fmt: skip
    lines = lines_by_metric(generation_task.measure(made), "wide", cached=True)
    assert lines["tasks_per_second"].value == 1 / 70
    assert lines["step_preparation"].value == 30.0
    assert len(notices) == 1, "the short one has no room for the task"


def test_an_eager_step_on_cpu_takes_no_preparation(monkeypatch):
    made, _ = make_session()
    model = made.variants[0].model
    cache = model.new_cache(1, 4)
    assert decode_timing.time_preparation(model, cache)[1] == 0
    monkeypatch.setattr(decode_timing, "make_decoder", lambda *_: object())
    assert decode_timing.time_preparation(model, cache)[1] > 0


@pytest.mark.parametrize("measure", [decode_latency, decode_throughput])
def test_preparing_a_decode_step_is_reported_apart(monkeypatch, measure):
    made, _ = make_session(batches=(2,), contexts=(4,))
    monkeypatch.setattr(decode_timing, "time_preparation", prepare_in_30_seconds)
    line = lines_by_metric(measure.measure(made), "wide", cached=True)["step_preparation"]
    assert (line.value, line.batch_size) == (30.0, 1 if measure is decode_latency else 2)


def test_products_slower_than_the_bandwidth_say_so():
    made, _ = make_session()
    notes = []
    for rate in (0.6e9, 0.8e9, None):
        made.device_peaks["float32"] = replace(PEAKS, product_bandwidth=rate)
        lines = lines_by_metric(decode_roofline.measure(made), "narrow")
        notes.append(lines["product_bandwidth"].note if rate else "")
    assert "60% of the bandwidth" in notes[0]
    assert notes[1] == "measured on made, 1 thread, float32"
