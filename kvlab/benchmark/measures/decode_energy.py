"""Joules per token, by the device's own energy counter."""

import time
from collections.abc import Iterator

import torch

from kvlab.benchmark.decode_timing import DecodeRun
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.session import Session, Variant

TABLES = (
    TableLayout("energy", ("batch_size",), {
        "joules_per_token": "J/token", "joules_ratio": "of the first's",
        "step_preparation": "to prepare a step",
    }),
)  # fmt: skip

MIN_TURN_SECONDS = 2.0
"""Minimum duration of a turn. The counter is updated about every 0.1 s, so its error over this
time is within a twentieth."""

ENERGY_VERDICTS = {"slower": "uses more", "faster": "uses less"}


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the energy of prefill and decode together per decoded token, by batch size."""
    nvml = session.nvml
    if nvml is None or nvml.read_joules() is None:
        session.on_notice(f"energy is left out: {session.device_name} does not report it (NVML)")
        return
    for batch in session.settings.batches:
        yield from _energy_lines(session, batch, nvml)


def _energy_lines(session: Session, batch: int, nvml: Nvml) -> Iterator[Measurement]:
    settings = session.settings
    session.activity = f"energy, batch {batch}"

    def turn(_variant: Variant, run: DecodeRun) -> dict[str, list[float]]:
        return _measure_turn(run, session.device, nvml)

    timings = session.time_decoding(turn, batch, settings.prompt_tokens)
    fields = settings.run_fields(batch)
    for variant in session.variants:
        samples = timings.samples[variant.name, "joules"]
        median = samples.quantile(0.5)
        reliability = session.reliability(timings, samples, variant)
        scope = "of the whole device, prefill included"
        reliability["note"] = "; ".join(filter(None, [scope, reliability["note"]]))
        yield session.make_line(
            "energy", "joules_per_token", variant, median.value, "J/token",
            low=median.low, high=median.high, **fields, **reliability,
        )  # fmt: skip
    yield from session.preparation_lines("energy", batch, settings.prompt_tokens, **fields)
    for line in session.compare_variants("energy", "joules_ratio", "joules", timings, **fields):
        verdict = ENERGY_VERDICTS.get(line.verdict or "")
        yield line.model_copy(update={"verdict": None, "note": verdict}) if verdict else line


def _measure_turn(run: DecodeRun, device: torch.device, nvml: Nvml) -> dict[str, list[float]]:
    """Return the joules per token over as many runs as fill `MIN_TURN_SECONDS`.

    Preparing the decode step is in none of them.
    """
    run.prepare()
    before, start, runs = _read_joules(device, nvml), time.monotonic(), 0
    while not runs or time.monotonic() - start < MIN_TURN_SECONDS:
        run.run()
        runs += 1
    used = _read_joules(device, nvml) - before
    return {"joules": [used / (runs * run.cache.batch_size * run.new_tokens)]}


def _read_joules(device: torch.device, nvml: Nvml) -> float:
    """Return the counter after the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    joules = nvml.read_joules()
    assert joules is not None, "measure() checked that the device counts energy"
    return joules
