"""Joules a token, from the device's own counter where it has one."""

import time
from collections.abc import Iterator

import torch

from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.session import Session, Variant

LEAST_SECONDS = 2.0
"""The counter moves about every 0.1 s; over this long that is within a twentieth."""


def measure(session: Session) -> Iterator[Measurement]:
    """Prefill and decode together, over all tokens decoded, at every batch size."""
    nvml = None
    if session.device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(session.device).uuid}"
        nvml = Nvml.open(uuid)
    if nvml is None or nvml.joules() is None:
        session.say(f"energy is left out: {session.device_name} does not report it (NVML)")
        return
    for batch in session.settings.batches:
        for variant in session.variants:
            yield _energy(session, variant, batch, nvml)


def _energy(session: Session, variant: Variant, batch: int, nvml: Nvml) -> Measurement:
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    decoder = variant.decoder
    cache = decoder.new_cache(batch, prompt + new)
    decoder.decode(cache, new)
    before, began, runs = nvml.joules() or 0.0, time.monotonic(), 0
    while time.monotonic() - began < LEAST_SECONDS:
        decoder.decode(cache, new)
        runs += 1
    torch.cuda.synchronize(session.device)
    used = (nvml.joules() or 0.0) - before
    return session.line(
        "energy", "joules_per_token", variant, used / (runs * batch * new), "J/token",
        batch_size=batch, prompt_tokens=prompt, new_tokens=new, context_length=prompt + new,
        cached=True, samples=runs, note="of the whole device, prefill included",
    )  # fmt: skip
