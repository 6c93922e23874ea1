"""`kvlab logs`: show the log of an attempt at a trial, or of a detached driver."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kvlab.cli.shared_arguments import add_cluster, add_json, add_store
from kvlab.errors import UsageError
from kvlab.store import Store
from kvlab.sweep.ops.detached_driver import (
    driver_log,
    list_driver_numbers,
    list_driver_sweeps,
    read_driver,
)

POLL_SECONDS = 0.3
START_SECONDS = 15.0
"""How long a new driver may take to record itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="TRIAL|SWEEP",
        help="a trial's id, or its first digits; or a sweep that was submitted with --detach",
    )
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="N",
        help="number of the attempt at a trial, or of the driver of a sweep (default: the last)",
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print until it ends; for a driver, exit with its exit code",
    )
    add_store(parser)
    add_cluster(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    if options.address:
        return _show_remote_log(options)
    store = Store(options.store)
    if options.name in list_driver_sweeps(store):
        return _show_driver_log(store, options)
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


def _show_driver_log(store: Store, options: argparse.Namespace) -> int:
    """Print the log of a detached driver; if followed to its end, return its exit code."""
    name = options.name
    numbers = list_driver_numbers(store, name)
    if not numbers:
        text = f"sweep = {name} was never submitted with --detach, so no driver has a log"
        raise UsageError(f"{text}; its trials have: see `kvlab status {name}`")
    number = _select_number(numbers, options.attempt, f"the drivers of {name}")
    log = driver_log(store, name, number)
    driver = read_driver(store, name, number)
    if options.json:
        facts = asdict(driver[0]) if driver else {"number": number}
        print(json.dumps({"sweep": name, **facts, "log": _read_log(log)}, indent=1))
        return 0

    def is_running() -> bool:
        nonlocal driver
        started = time.monotonic()
        while (driver := read_driver(store, name, number)) is None:  # it has just been started
            if time.monotonic() - started > START_SECONDS:
                return False
            time.sleep(POLL_SECONDS)
        return driver[1] == "running"

    _print_following(log, lambda: options.follow and is_running())
    if not options.follow or driver is None:
        return 0
    code = driver[0].exit_code
    return 1 if code is None else code


def _show_remote_log(options: argparse.Namespace) -> int:
    from kvlab.cli.remote_commands import remote_logs

    words = [f"--attempt={options.attempt}"] if options.attempt is not None else []
    words += ["--follow"] * options.follow + ["--json"] * options.json
    return remote_logs(options.address, options.name, options.store, words, follow=options.follow)


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
    return _select_number(attempts, number, f"the attempts at trial {trial}")


def _select_number(numbers: list[int], number: int | None, what: str) -> int:
    if number is not None and number not in numbers:
        text = ", ".join(map(str, numbers))
        raise UsageError(f"--attempt = {number} is none of {what}; use one of {text}")
    return numbers[-1] if number is None else number


def _read_log(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _print_from(path: Path, position: int) -> int:
    """Print a file from a byte offset on; return the offset of its end."""
    if not path.exists():
        return position
    with open(path, "rb") as file:
        file.seek(position)
        data = file.read()
    sys.stdout.write(data.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return position + len(data)
