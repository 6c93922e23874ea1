"""`kvlab logs`: show the log of a trial, or of the trials of a sweep that run."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import add_json, add_store
from kvlab.errors import StoreError, UsageError
from kvlab.fs.atomic_files import open_regular
from kvlab.store import Store

POLL_SECONDS = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="TRIAL|SWEEP",
        help="a trial's id, or its first digits; or a sweep: the trials that run, else those that"
        " failed, else the last one that ended",
    )
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="N",
        help="number of the attempt at a trial (default: the last)",
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print until it ends",
    )
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    if options.name in store.sweep_names():
        return _show_trial_logs(store, options)
    trial = store.find_trial(options.name)
    attempt = _select_attempt(store, trial, options.attempt)
    directory = store.attempt_directory(trial, attempt)
    log, trace = directory / "log.txt", directory / "traceback.txt"
    if options.json:
        facts = {
            "trial": trial,
            "attempt": attempt,
            "log": _read_log(log),
            "traceback": _read_log(trace),
        }
        print(json.dumps(facts, indent=1))
        return 0
    _print_following(
        log,
        lambda: options.follow and store.is_running(trial) and attempt == store.attempts(trial)[-1],
    )
    _print_from(trace, 0)
    return 0


def _show_trial_logs(store: Store, options: argparse.Namespace) -> int:
    """Print the logs of a sweep's trials that run, else failed, else the last one that ended."""
    name = options.name
    if options.attempt is not None:
        text = f"--attempt = {options.attempt} is of one trial, and {name} is a sweep"
        raise UsageError(f"{text}; name a trial: see `kvlab status {name}`")
    trials = [trial for trial in store.sweep_trials(name) if store.attempts(trial)]
    shown = _select_trials(store, trials)
    if options.json:
        logs = [{"trial": trial, "log": _read_log(_last_log(store, trial))} for trial in shown]
        print(json.dumps({"sweep": name, "trials": logs}, indent=1))
        return 0
    if not shown and not store.is_driven(name):
        print(f"no trial of {name} has begun; see `kvlab status {name}`")
    positions = {_last_log(store, trial): 0 for trial in shown}
    _print_lines(positions)
    while options.follow and store.is_driven(name):
        time.sleep(POLL_SECONDS)
        running = [trial for trial in store.sweep_trials(name) if store.is_running(trial)]
        positions = {_last_log(store, one): 0 for one in running if store.attempts(one)} | positions
        _print_lines(positions)
    _print_lines(positions)
    return 0


def _select_trials(store: Store, trials: list[str]) -> list[str]:
    running = [trial for trial in trials if store.is_running(trial)]
    failed = [trial for trial in trials if store.status(trial) == "failed"]
    logged = [trial for trial in trials if _last_log(store, trial).exists()]
    newest = sorted(logged, key=lambda trial: _last_log(store, trial).stat().st_mtime)[-1:]
    return running or failed or newest


def _last_log(store: Store, trial: str) -> Path:
    return store.attempt_directory(trial, store.attempts(trial)[-1]) / "log.txt"


def _print_lines(positions: dict[Path, int]) -> None:
    """Print the whole lines of logs from byte offsets on, each with its trial; move the offsets."""
    for path, position in positions.items():
        if not path.exists():
            continue
        data = _read_from(path, position)
        end = data.rfind(b"\n") + 1
        positions[path] = position + end
        trial = path.parts[-4][:ID_DIGITS]
        for line in data[:end].decode("utf-8", errors="replace").splitlines():
            print(f"{trial}  {line}", flush=True)


def _print_following(path: Path, is_growing: Callable[[], bool]) -> None:
    """Print a file, and what is appended to it while ``is_growing``."""
    position = _print_from(path, 0)
    while is_growing():
        time.sleep(POLL_SECONDS)
        position = _print_from(path, position)
    _print_from(path, position)


def _select_attempt(store: Store, trial: str, number: int | None) -> int:
    attempts = store.attempts(trial)
    if not attempts:
        raise UsageError(f"trial = {trial} has no attempt yet")
    if number is not None and number not in attempts:
        text = f"--attempt = {number} is none of the attempts at trial {trial}"
        raise UsageError(f"{text}; use one of {', '.join(map(str, attempts))}")
    return attempts[-1] if number is None else number


def _read_log(path: Path) -> str | None:
    return _read_from(path, 0).decode("utf-8", "replace") if path.exists() else None


def _read_from(path: Path, position: int) -> bytes:
    """Return the bytes of a log from an offset on.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        with open_regular(path) as file:
            file.seek(position)
            return file.read()
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}"
        raise StoreError(f"{text}; remove it, or repair its permissions") from None


def _print_from(path: Path, position: int) -> int:
    """Print a file from a byte offset on; return the offset of its end."""
    if not path.exists():
        return position
    data = _read_from(path, position)
    sys.stdout.write(data.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return position + len(data)
