"""Progress of a running trial: written to its directory, its log, and passed to a listener."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlab.fs.atomic_files import replace_file
from kvlab.fs.lease import Fence
from kvlab.humanize import format_bytes, format_duration, format_number
from kvlab.store.provenance import utc_now

ProgressUpdate = Mapping[str, Any]
OnProgress = Callable[[dict[str, Any]], None]

WRITE_INTERVAL_SECONDS = 0.5
LOG_INTERVAL_SECONDS = 10.0


class ProgressReporter:
    """Pass on the updates of a trial's stages: a new stage at once, others at intervals.

    An update is ``{"stage": ...}`` with any of ``step``, ``steps``, ``loss``,
    ``tokens_per_second``, ``flops_per_second``, ``mfu`` (per device), ``peak_bytes``,
    ``process_bytes``, ``seconds_left``, ``note`` and ``curves``: those of a result, as far as the
    training has come.

    Args:
        log: writes a line to the trial's log.
        listener: receives each update that is written.
    """

    def __init__(
        self,
        path: Path,
        log: Callable[[str], None],
        listener: OnProgress | None = None,
        fence: Fence | None = None,
    ):
        self._path, self._log, self._listener, self._fence = path, log, listener, fence
        self._stage: str | None = None
        self._written_at = self._logged_at = float("-inf")

    def __call__(self, update: ProgressUpdate) -> None:
        state = dict(update)
        now, stage = time.monotonic(), str(state.get("stage", ""))
        is_new_stage = stage != self._stage
        self._stage = stage
        if is_new_stage or now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            self._log(format_progress(state))
        if is_new_stage or now - self._written_at >= WRITE_INTERVAL_SECONDS:
            self._written_at = now
            write_progress(self._path, {**state, "updated": utc_now()}, self._fence)
            if self._listener is not None:
                self._listener(state)


def write_progress(path: Path, state: ProgressUpdate, fence: Fence | None = None) -> None:
    """Replace the progress file, without syncing it: it matters only while the trial runs."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(state))
    try:
        replace_file(temporary, path, fence)
    finally:
        temporary.unlink(missing_ok=True)


def format_progress(state: ProgressUpdate) -> str:
    """Return one line of stage, step, loss, rate and time left, as far as they are there."""
    parts = [str(state.get("stage", "running"))]
    if state.get("steps"):
        parts.append(f"{state.get('step', 0):,}/{state['steps']:,}")
    if state.get("loss") is not None:
        parts.append(f"loss {state['loss']:.4f}")
    if state.get("tokens_per_second"):
        parts.append(f"{state['tokens_per_second']:,.0f} tokens/s")
    if state.get("mfu") and state.get("flops_per_second"):
        rate = format_number(state["flops_per_second"], "FLOP/s")
        parts.append(f"{rate}, MFU {100 * state['mfu']:.0f}%")
    if state.get("peak_bytes"):
        process = state.get("process_bytes")
        beside = f" (process {format_bytes(process)})" if process else ""
        parts.append(f"peak {format_bytes(state['peak_bytes'])}{beside}")
    if state.get("seconds_left") is not None:
        parts.append(f"{format_duration(state['seconds_left'])} left")
    if state.get("note"):
        parts.append(str(state["note"]))
    return "  ".join(parts)
