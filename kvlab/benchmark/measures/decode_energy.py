"""Joules a token, from the device's own counter where it has one."""

import time
from collections.abc import Iterator
from functools import partial

import torch

from kvlab.benchmark.decode_timing import TimedDecoder
from kvlab.benchmark.interleaving import Work
from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.session import Session, compare_variants
from kvlab.cache import KVCache

MIN_TURN_SECONDS = 2.0
"""Of one turn. The counter moves about every 0.1 s; over this long that is within a twentieth."""

ENERGY_VERDICTS = {"slower": "uses more", "faster": "uses less"}


def measure(session: Session) -> Iterator[Measurement]:
    """Prefill and decode together, over all tokens decoded, at every batch size; the variants in
    turns, as times are."""
    nvml = session.nvml
    if nvml is None or nvml.joules() is None:
        session.say(f"energy is left out: {session.device_name} does not report it (NVML)")
        return
    for batch in session.settings.batches:
        yield from _energy_lines(session, batch, nvml)


def _energy_lines(session: Session, batch: int, nvml: Nvml) -> Iterator[Measurement]:
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    session.doing = f"energy, batch {batch}"
    works: dict[str, Work] = {}
    for variant in session.variants:
        decoder = variant.decoder
        cache = decoder.new_cache(batch, prompt + new)
        works[variant.name] = partial(_measure_turn, decoder, cache, new, nvml)
    timed = session.take_turns(works)
    place = {
        "batch_size": batch,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "context_length": prompt + new,
        "cached": True,
    }
    for variant in session.variants:
        samples = timed.samples[variant.name, "joules"]
        middle = samples.quantile(0.5)
        trust = session.trust(timed, samples)
        whole = "of the whole device, prefill included"
        trust["note"] = "; ".join(filter(None, [whole, trust["note"]]))
        yield session.line(
            "energy", "joules_per_token", variant, middle.value, "J/token",
            low=middle.low, high=middle.high, **place, **trust,
        )  # fmt: skip
    for line in compare_variants(session, "energy", "joules_ratio", "joules", timed, **place):
        said = ENERGY_VERDICTS.get(line.verdict or "")
        yield line.model_copy(update={"verdict": None, "note": said}) if said else line


def _measure_turn(
    decoder: TimedDecoder, cache: KVCache, new_tokens: int, nvml: Nvml
) -> dict[str, list[float]]:
    """Joules a token over as many runs as take `LEAST_SECONDS`, one at least."""
    before, began, runs = _read_joules(decoder, nvml), time.monotonic(), 0
    while not runs or time.monotonic() - began < MIN_TURN_SECONDS:
        decoder.decode(cache, new_tokens)
        runs += 1
    used = _read_joules(decoder, nvml) - before
    return {"joules": [used / (runs * cache.batch_size * new_tokens)]}


def _read_joules(decoder: TimedDecoder, nvml: Nvml) -> float:
    """The counter once the device has done all that it was given."""
    if decoder.model.device.type == "cuda":
        torch.cuda.synchronize(decoder.model.device)
    counted = nvml.joules()
    assert counted is not None, "the device counts energy: that was seen before"
    return counted
