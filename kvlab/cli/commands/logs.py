"""`kvlab logs`: what an attempt at a trial said, and its traceback if it failed."""

import argparse
import json
import sys
import time
from pathlib import Path

from kvlab.cli.options import add_json, add_store
from kvlab.errors import UsageError
from kvlab.trial import Store

POLL_SECONDS = 0.3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trial", metavar="TRIAL", help="a trial's id, or its first digits")
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the last")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on printing until the attempt ends"
    )
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    trial = store.find_trial(options.trial)
    attempt = _attempt(store, trial, options.attempt)
    directory = store.attempt_directory(trial, attempt)
    log, trace = directory / "log.txt", directory / "traceback.txt"
    if options.json:
        facts = {"trial": trial, "attempt": attempt, "log": _read(log), "traceback": _read(trace)}
        print(json.dumps(facts, indent=1))
        return 0
    position = _print_from(log, 0)
    while options.follow and store.is_running(trial) and attempt == store.attempts(trial)[-1]:
        time.sleep(POLL_SECONDS)
        position = _print_from(log, position)
    _print_from(log, position)
    _print_from(trace, 0)
    return 0


def _attempt(store: Store, trial: str, asked: int | None) -> int:
    known = store.attempts(trial)
    if not known:
        raise UsageError(f"trial = {trial} has no attempt yet")
    if asked is not None and asked not in known:
        text = ", ".join(map(str, known))
        raise UsageError(f"--attempt = {asked} is none of trial {trial}'s; use one of {text}")
    return known[-1] if asked is None else asked


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _print_from(path: Path, position: int) -> int:
    """Prints a file from a byte on; returns where it ended."""
    if not path.exists():
        return position
    with open(path, "rb") as file:
        file.seek(position)
        data = file.read()
    sys.stdout.write(data.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return position + len(data)
