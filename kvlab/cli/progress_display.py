"""Progress of a running sweep: redrawn in place on a terminal, plain lines in pipes and logs."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from kvlab.cli.terminal import LiveScreen
from kvlab.humanize import format_bytes, format_duration, sanitize_line
from kvlab.store import Store
from kvlab.store.attempt import ProgressUpdate, format_progress
from kvlab.sweep import Driver
from kvlab.sweep.driver.sweep_progress import NOT_OVER, Event, estimate_pace, list_durations
from kvlab.sweep.planning.planner import PlannedTrial

REDRAW_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
ID_DIGITS = 8
STARTING: ProgressUpdate = {"stage": "starting"}


class ProgressDisplay:
    """Print one line for every event of a driver, and show the trials that run.

    On a terminal, the running trials and the state of the sweep are redrawn in place. Elsewhere
    one line shows them every 10 seconds. A thread does this, because the driver waits for trials
    or, with the inline executor, runs them. It reads the progress files of the trials.

    Args:
        sweep: Its name.
        store: Where the trials are recorded.
        stream: Receives the lines.
    """

    def __init__(self, sweep: str, store: Store, stream: TextIO):
        self._sweep, self._store, self._screen = sweep, store, LiveScreen(stream)
        self._started = time.monotonic()
        self._preparation = ""
        self._durations: list[float] = []
        self._is_redrawn = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    @contextmanager
    def watch(self, driver: Driver) -> Iterator[None]:
        """Show the progress of ``driver``, which runs one stage, during the block."""
        self._durations = []
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(driver, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._screen.clear()

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        self._screen.print_line(line)

    def report_preparation(self, line: str) -> None:
        """Print the first line about the preparation of data; show later ones in the summary.

        An empty line removes it from the summary.
        """
        if line and not self._preparation:
            self.print_line(f"preparing data: {line}")
        self._preparation = line

    def handle_event(self, event: Event) -> None:
        """Print an event of the driver."""
        self._preparation = ""
        planned = event.planned
        label = _trial_label(planned)
        if event.kind == "started":
            if not self._is_redrawn:
                self.print_line(f"started {label}")
        elif event.kind in ("retried", "healed", "waiting"):
            word = "again" if event.kind == "retried" else event.kind
            self.print_line(f"{word:<7} {label}: {event.message}")
        elif event.kind == "halted":
            self.print_line(f"giving up: {event.message}")
        elif event.status in NOT_OVER:
            self.print_line(f"{event.status:<7} {label}")
        else:
            if event.status == "done" and event.seconds is not None:
                self._durations += list_durations(self._store, [planned.trial.id])
            outcome = format_outcome(self._store, planned.trial.id)
            duration = "elsewhere" if event.seconds is None else format_duration(event.seconds)
            self.print_line(f"{event.status:<7} {label}  {duration}  {outcome}".rstrip())

    def _run(self, driver: Driver, ended: threading.Event) -> None:
        interval = REDRAW_SECONDS if self._is_redrawn else HEARTBEAT_SECONDS
        last_shown = time.monotonic()
        announced_stop = False
        while not ended.wait(REDRAW_SECONDS):
            if driver.is_stopping and not announced_stop:
                announced_stop = True
                self.print_line("stopping at the next checkpoints; Ctrl-C again ends it at once")
            if time.monotonic() - last_shown >= interval - REDRAW_SECONDS / 2:
                last_shown = time.monotonic()
                trials = driver.running_trials
                running = [self._store.progress(one.trial.id) or STARTING for one in trials]
                summary, texts = self.format_summary(driver, running), map(format_progress, running)
                progress = list(zip(trials, texts, strict=True))
                if self._is_redrawn:
                    lines = [f"{_trial_label(one)}  {text}" for one, text in progress]
                    self._screen.redraw(lines, summary)
                else:
                    parts = (f"{one.trial.id[:ID_DIGITS]} {text}" for one, text in progress)
                    self.print_line("; ".join([summary, *parts]))

    def format_summary(self, driver: Driver, running: Sequence[ProgressUpdate]) -> str:
        """Return how the trials have ended so far, and the time that is left."""
        counts = driver.count_states()
        parts = [f"{self._sweep}: {counts['done']}/{counts.total()} done"]
        parts += [f"{counts[s]} {s}" for s in ("failed", "diverged", "pruned") if counts[s]]
        if driver.remote_trials:
            parts.append(f"elsewhere: {len(driver.remote_trials)}")
        parts.append(f"{format_duration(time.monotonic() - self._started)} elapsed")
        missing = counts["missing"] - len(running)
        seconds_left = estimate_pace(running, self._durations, missing)["seconds_left"]
        if seconds_left is not None:
            parts.append(f"about {format_duration(seconds_left)} left")
        if self._preparation:
            parts.append(f"preparing data: {self._preparation}")
        return ", ".join(parts)


def format_outcome(store: Store, trial_id: str) -> str:
    """Return the main numbers of a trial's result, or why there are none, in one line."""
    result = store.result(trial_id)
    if result is None:
        return ""
    if facts := result.get("pruned"):
        steps = f"after step {facts['step']:,} of {facts['steps']:,}"
        return f"validation loss {facts['loss']:.4f} {steps}"
    if error := result.get("error"):
        message = (error["message"].splitlines() or [""])[0]
        hint = f"kvlab logs {trial_id[:ID_DIGITS]}"
        return sanitize_line(f"{error.get('class')}: {error.get('type')}: {message} ({hint})")
    values = {**result.get("measurements", {}), **result.get("kv", {})}
    forms: dict[str, Callable[[float], str]] = {
        "loss": "loss {:.4f}".format,
        "serving_gap": "served {:+z.4f}".format,  # z: no -0.0000
        "hellaswag_acc_norm": "HellaSwag {:.1%}".format,
        "bytes_at_block_size": lambda size: f"KV {format_bytes(size)}",
        "tpot_ms_p50": "{:.2f} ms/token".format,
    }
    return "  ".join(form(values[name]) for name, form in forms.items() if name in values)


def _trial_label(planned: PlannedTrial) -> str:
    return f"{planned.trial.id[:ID_DIGITS]} {planned.label} seed={planned.trial.seed}"
