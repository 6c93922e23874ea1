"""What `kvlab submit` shows while it runs: redrawn lines on a terminal, plain lines elsewhere."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from kvlab.cli.terminal import format_bytes
from kvlab.store import Store
from kvlab.store.progress import format_duration, format_progress
from kvlab.sweep.driver.driver import Driver
from kvlab.sweep.driver.eta import RemainingTime
from kvlab.sweep.driver.events import Event
from kvlab.sweep.planning.planner import Plan, PlannedTrial, trials_to_run
from kvlab.trial.finalize import format_pruned

REDRAW_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
ID_DIGITS = 8

_UP, _CLEAR = "\x1b[A", "\x1b[J"


class ProgressDisplay:
    """One line for every event; and, redrawn, one for every running trial and for the sweep.

    The redrawing runs in a thread of its own, so that it goes on while the driver waits or, with
    the inline executor, works. It reads the progress that trials write to their directories.
    """

    def __init__(self, plan: Plan, store: Store, stream: TextIO, *, retry_failed: bool = False):
        self._name, self._store, self._stream = plan.sweep.name, store, stream
        missing = trials_to_run(plan, retry_failed)
        self._total = len(plan.trials)
        self._known = {planned.trial.id for planned in plan.trials}
        self._done = self._total - len(missing)
        self._failed = sum(planned.state == "failed" for planned in plan.trials)
        if retry_failed:
            self._failed = 0
        self._pruned = {p.trial.id for p in plan.trials if p.state == "pruned"}
        self._pace = RemainingTime(missing)
        self._terminal = stream.isatty()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._drawn = 0
        self._started = time.monotonic()
        self._told_stopping = False
        self._note = ""
        self._elsewhere = 0

    @contextmanager
    def watch(self, driver: Driver) -> Iterator[None]:
        """Shows progress for the length of the block."""
        thread = threading.Thread(target=self._loop, args=(driver,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            with self._lock:
                self._erase()

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        with self._lock:
            self._erase()
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def note(self, line: str) -> None:
        """Takes a line about what is prepared before the first trial; the last one is shown."""
        if not self._note:
            self.say(f"preparing data: {line}")
        self._note = line

    def prepared(self) -> None:
        """Ends what `note` said."""
        self._note = ""

    def event(self, event: Event) -> None:
        """Takes a driver's event."""
        self._note = ""
        planned = event.planned
        if planned.trial.id not in self._known:  # a search's
            self._known.add(planned.trial.id)
            self._total += 1
        if event.kind == "started":
            if planned.trial.id in self._pruned:  # it goes on after all
                self._pruned.remove(planned.trial.id)
                self._done -= 1
            self._pace.started(planned)
            if not self._terminal:
                self.say(f"started {_label(planned)}")
        elif event.kind == "retried":
            self.say(f"again   {_label(planned)}: {event.message}")
        elif event.kind == "waiting":
            self.say(f"waiting {_label(planned)}: {event.message}")
        elif event.kind == "halted":
            self.say(f"giving up: {event.message}")
        elif event.status in ("stopped", "paused", "elsewhere"):
            self._pace.dropped(planned)
            self.say(f"{event.status:<7} {_label(planned)}")
        else:
            self._pace.ended(planned, None if event.elsewhere else event.seconds)
            self._done += 1
            self._failed += event.status == "failed"
            if event.status == "pruned":
                self._pruned.add(planned.trial.id)
            facts = outcome_line(self._store, planned.trial.id)
            took = "elsewhere" if event.elsewhere else format_duration(event.seconds)
            self.say(f"{event.status:<7} {_label(planned)}  {took}  {facts}".rstrip())

    def _loop(self, driver: Driver) -> None:
        pause = REDRAW_SECONDS if self._terminal else HEARTBEAT_SECONDS
        beat = time.monotonic()
        while not self._ended.wait(REDRAW_SECONDS):
            if driver.stopping and not self._told_stopping:
                self._told_stopping = True
                self.say("stopping at the next checkpoints; Ctrl-C again ends it at once")
            if time.monotonic() - beat >= pause - REDRAW_SECONDS / 2:
                beat = time.monotonic()
                self._elsewhere = len(driver.elsewhere)
                self._show(driver.running)

    def _show(self, running: list[PlannedTrial]) -> None:
        lines = [self._running_line(planned) for planned in running]
        if not self._terminal:
            self.say("; ".join([self._sweep_line(), *lines]))
            return
        with self._lock:
            self._erase()
            width = shutil.get_terminal_size().columns - 1
            shown = [line[:width] for line in [*lines, self._sweep_line()]]
            self._stream.write("".join(f"{line}\n" for line in shown))
            self._stream.flush()
            self._drawn = len(shown)

    def _running_line(self, planned: PlannedTrial) -> str:
        state = self._store.progress(planned.trial.id) or {"stage": "starting"}
        text = format_progress(state)
        return f"{_label(planned)}  {text}" if self._terminal else f"{_short_id(planned)} {text}"

    def _sweep_line(self) -> str:
        parts = [f"{self._name}: {self._done}/{self._total} done"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._elsewhere:
            parts.append(f"elsewhere: {self._elsewhere}")
        parts.append(f"{format_duration(time.monotonic() - self._started)} elapsed")
        left = self._pace.seconds_left()
        if left is not None:
            parts.append(f"about {format_duration(left)} left")
        if self._note:
            parts.append(f"preparing data: {self._note}")
        return ", ".join(parts)

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write("\r" + _UP * self._drawn + _CLEAR)
            self._drawn = 0


def outcome_line(store: Store, trial_id: str) -> str:
    """The main numbers of a result, or why there are none."""
    result = store.result(trial_id)
    if result is None:
        return ""
    if result["status"] == "pruned":
        return format_pruned(result)
    if result["error"]:
        error = result["error"]
        first = (str(error["message"]).splitlines() or [""])[0]
        return f"{error['class']}: {error['type']}: {first} (kvlab logs {trial_id[:ID_DIGITS]})"
    return "  ".join(_main_numbers(result))


def _main_numbers(result: dict[str, Any]) -> Iterator[str]:
    found = result["measurements"]
    if "loss" in found:
        yield f"loss {found['loss']:.4f}"
    if "serving_gap" in found:
        yield f"served {round(found['serving_gap'], 4) + 0.0:+.4f}"  # no -0.0000
    if "hellaswag_acc_norm" in found:
        yield f"HellaSwag {found['hellaswag_acc_norm']:.1%}"
    yield f"KV {format_bytes(result['kv']['bytes_at_block_size'])}"
    if "tpot_ms_p50" in found:
        yield f"{found['tpot_ms_p50']:.2f} ms/token"


def _short_id(planned: PlannedTrial) -> str:
    return planned.trial.id[:ID_DIGITS]


def _label(planned: PlannedTrial) -> str:
    return f"{_short_id(planned)} {planned.label} seed={planned.trial.seed}"
