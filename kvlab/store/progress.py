"""Progress of a running trial: to its directory, to its log, and to whoever listens."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlab.fs.atomic_files import replace_guarded
from kvlab.store.provenance import utc_now

ProgressUpdate = Mapping[str, Any]
OnProgress = Callable[[dict[str, Any]], None]

WRITE_INTERVAL_SECONDS = 0.5
LOG_INTERVAL_SECONDS = 10.0


class ProgressReporter:
    """Takes the stages' updates. A new stage is passed on at once, the rest now and then.

    An update is ``{"stage": ...}`` with any of ``step``, ``steps``, ``loss``,
    ``tokens_per_second``, ``flops_per_second``, ``mfu`` (of each device), ``peak_bytes``,
    ``seconds_left`` and ``note``.
    """

    def __init__(self, path: Path, log: Callable[[str], None], listener: OnProgress | None = None):
        self._path, self._log, self._listener = path, log, listener
        self._stage: str | None = None
        self._written = self._logged = float("-inf")

    def __call__(self, update: ProgressUpdate) -> None:
        state = dict(update)
        moment, stage = time.monotonic(), str(state.get("stage", ""))
        fresh = stage != self._stage
        self._stage = stage
        if fresh or moment - self._logged >= LOG_INTERVAL_SECONDS:
            self._logged = moment
            self._log(format_progress(state))
        if fresh or moment - self._written >= WRITE_INTERVAL_SECONDS:
            self._written = moment
            write_progress(self._path, {**state, "updated": utc_now()})
            if self._listener is not None:
                self._listener(state)


def write_progress(path: Path, state: ProgressUpdate) -> None:
    """Replaces ``path`` whole, but not synced to disk: it matters only while the trial runs."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(state))
    replace_guarded(temporary, path)


def format_progress(state: ProgressUpdate) -> str:
    """One line: stage, step, loss, rate, time left; only what there is."""
    parts = [str(state.get("stage", "running"))]
    if state.get("steps"):
        parts.append(f"{state.get('step', 0):,}/{state['steps']:,}")
    if state.get("loss") is not None:
        parts.append(f"loss {state['loss']:.4f}")
    if state.get("tokens_per_second"):
        parts.append(f"{state['tokens_per_second']:,.0f} tokens/s")
    if state.get("mfu") and state.get("flops_per_second"):
        parts.append(
            f"{format_scaled(state['flops_per_second'])}FLOP/s, MFU {100 * state['mfu']:.0f}%"
        )
    if state.get("peak_bytes"):
        parts.append(f"peak {format_scaled(state['peak_bytes'])}B")
    if state.get("seconds_left") is not None:
        parts.append(f"{format_duration(state['seconds_left'])} left")
    if state.get("note"):
        parts.append(str(state["note"]))
    return "  ".join(parts)


def format_scaled(value: float) -> str:
    """Two or three digits and a decimal prefix: ``62.5 G``, ``1.2 T``; a unit comes after it."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{value:.3g} {prefixes[0]}"


def format_duration(seconds: float) -> str:
    """``7s``, ``3m05s``, ``2h07m``, ``4d03h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
