"""`kvlab logs`: show the log of a trial, or of the trials of a sweep that run."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import add_record
from kvlab.errors import StoreError, UsageError
from kvlab.fs.atomic_files import open_regular
from kvlab.store import Store

POLL_SECONDS = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a trial, or a sweep: its trials that run, else those that failed, else its last one"
    parser.add_argument("name", metavar="TRIAL|SWEEP", help=text)
    text = "attempt of a trial (default: the last)"
    parser.add_argument("--attempt", type=int, metavar="N", help=text)
    parser.add_argument("-f", "--follow", action="store_true", help="print until it ends")
    add_record(parser)


def run(options: argparse.Namespace) -> None:
    store = Store(options.store)
    if options.name in store.sweep_names():
        _show_sweep(store, options)
        return
    trial = store.find_trial(options.name)
    attempts, number = store.attempts(trial), options.attempt
    if not attempts:
        raise UsageError(f"trial = {trial} has no attempt yet")
    if number is not None and number not in attempts:
        text = f"--attempt = {number} is none of the attempts at trial {trial}"
        raise UsageError(f"{text}; use one of {', '.join(map(str, attempts))}")
    number = attempts[-1] if number is None else number
    directory = store.attempt_directory(trial, number)
    log, trace = directory / "log.txt", directory / "traceback.txt"
    if options.json:
        texts = {"log": _read_log(log), "traceback": _read_log(trace)}
        print(json.dumps({"trial": trial, "attempt": number, **texts}, indent=1))
        return

    def is_running() -> bool:
        return store.is_running(trial) and number == store.attempts(trial)[-1]

    _print_logs({log: 0}, is_running if options.follow else None)
    _print_logs({trace: 0}, None)


def _show_sweep(store: Store, options: argparse.Namespace) -> None:
    """Print the logs of a sweep's running trials, else failed ones, else the last that ended."""
    name = options.name
    if options.attempt is not None:
        text = f"--attempt = {options.attempt} needs a trial, and {name} is a sweep"
        raise UsageError(f"{text}; name a trial: see `kvlab status {name}`")
    logs = _find_logs(store, name)
    running = [trial for trial in logs if store.is_running(trial)]
    failed = [trial for trial in logs if store.status(trial) == "failed"]
    ended = [trial for trial, log in logs.items() if log.exists()]
    newest = sorted(ended, key=lambda trial: logs[trial].stat().st_mtime)[-1:]
    shown = running or failed or newest
    if options.json:
        facts = [{"trial": trial, "log": _read_log(logs[trial])} for trial in shown]
        print(json.dumps({"sweep": name, "trials": facts}, indent=1))
        return
    if not shown and not store.is_driven(name):
        print(f"no trial of {name} has begun; see `kvlab status {name}`")
    positions = {logs[trial]: 0 for trial in shown}

    def is_driven() -> bool:
        for trial, log in _find_logs(store, name).items():
            if store.is_running(trial):
                positions.setdefault(log, 0)
        return store.is_driven(name)

    _print_logs(positions, is_driven if options.follow else None, with_trial=True)


def _find_logs(store: Store, sweep: str) -> dict[str, Path]:
    """Return the log of the last attempt at every trial of a sweep that has begun."""
    attempts = {trial: store.attempts(trial) for trial in store.sweep_trials(sweep)}
    return {t: store.attempt_directory(t, n[-1]) / "log.txt" for t, n in attempts.items() if n}


def _print_logs(
    positions: dict[Path, int], goes_on: Callable[[], bool] | None, *, with_trial: bool = False
) -> None:
    """Print logs from byte offsets on, in whole lines until nothing goes on any more.

    Args:
        positions: Offsets by path, which may grow.
        goes_on: None prints what is there.
        with_trial: Begin every line with its trial.
    """
    while True:
        is_last = goes_on is None or not goes_on()
        for path, position in positions.items():
            data = _read_from(path, position)
            end = len(data) if is_last else data.rfind(b"\n") + 1
            positions[path] = position + end
            trial = f"{path.parts[-4][:ID_DIGITS]}  " if with_trial else ""
            for line in data[:end].decode("utf-8", errors="replace").splitlines():
                print(f"{trial}{line}", flush=True)
        if is_last:
            return
        time.sleep(POLL_SECONDS)


def _read_log(path: Path) -> str | None:
    return _read_from(path, 0).decode("utf-8", "replace") if path.exists() else None


def _read_from(path: Path, position: int) -> bytes:
    """Return the bytes of a log from an offset on; none if there is no such file.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        with open_regular(path) as file:
            file.seek(position)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}"
        raise StoreError(f"{text}; remove it, or repair its permissions") from None
