"""The record on disk, which is the truth: one directory a trial, one writer at a time.

    <store>/trainings/<id>/  config.json, checkpoints/, rungs.json, final/,
                             training.json | diverged.json
    <store>/trials/<id>/     trial.json, progress.json, result.json, items.jsonl.gz,
                             attempts/<n>/{log.txt, traceback.txt, paused}
    <store>/sweeps/<name>/   sweep.json, stop, drivers/

Locks stand beside them, as ``lock.<n>`` (`kvlab.fs.lease`).

``result.json`` is there if and only if the trial has ended. Readers pass over names that kvlab
did not give and over files that a kill left half written.
"""

import contextlib
import gzip
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

from kvlab.errors import LeaseLost, StoreError, UsageError
from kvlab.fs.atomic_files import read_json, write_atomic, write_json
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock, seems_held
from kvlab.spec.spec_model import NAME_PATTERN, NAME_RULE

SCHEMA = 1

Status = Literal["done", "failed", "diverged", "pruned", "damaged"]
"""How a trial ended; ``damaged`` if its result cannot be read (it is then run again);
``pruned`` if a search has paused its training (whoever wants it runs it on)."""

_ID = re.compile(r"[0-9a-f]{16}\Z")
_RESULT_HEAD = re.compile(
    rb'\{\s*"schema": 1,\s*"trial": "\w+",\s*"training": "\w+",'
    rb'\s*"status": "(done|failed|diverged|pruned)"'
)

_RESULT_TAIL = b"\n}\n"  # only the outermost brace stands at the start of a line


class Store:
    """Reads and writes the record under ``path``. Making one touches nothing on disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(
                f"{path} is a file, and a store is a folder; name another with --store"
            )

    # Places

    def trial_directory(self, trial_id: str) -> Path:
        return self.path / "trials" / _check_id(trial_id)

    def training_directory(self, training_id: str) -> Path:
        return self.path / "trainings" / _check_id(training_id)

    def sweep_directory(self, name: str) -> Path:
        if not re.match(NAME_PATTERN, name) or name.endswith("\n"):
            raise UsageError(f"sweep = {name!r} is not a name; {NAME_RULE}")
        return self.path / "sweeps" / name

    def stop_flag(self, name: str) -> Path:
        """The file whose presence asks the trials of a sweep to stop."""
        return self.sweep_directory(name) / "stop"

    def new_driver_stop_flag(self, name: str) -> Path:
        """A new place for a file that asks the trials of one driver alone to stop."""
        return self.sweep_directory(name) / "drivers" / f"{secrets.token_hex(8)}.stop"

    # Locks

    def trial_lock(self, trial_id: str) -> Lock:
        directory = self.trial_directory(trial_id)
        return Lock(directory / "lock")

    def training_lock(self, training_id: str) -> Lock:
        directory = self.training_directory(training_id)
        return Lock(directory / "lock")

    def report_lock(self, name: str) -> Lock:
        return Lock(self.sweep_directory(name) / "report")

    def driver_lock(self, name: str) -> Lock:
        """A lock of one driver's own, which says that it is there; there may be several."""
        return Lock(
            self.sweep_directory(name) / "drivers" / secrets.token_hex(8), remove_on_release=True
        )

    def driver_locks(self, name: str) -> Iterator[Lock]:
        """Those of all drivers that are or were there."""
        folder = self.sweep_directory(name) / "drivers"
        for driver in sorted({file.partition(".")[0] for file in _list_names(folder)}):
            if _ID.match(driver):
                yield Lock(folder / driver)

    def is_running(self, trial_id: str) -> bool:
        return seems_held(self.trial_directory(trial_id) / "lock")

    def is_driven(self, name: str) -> bool:
        """Whether a driver runs this sweep now."""
        return any(seems_held(lock.path) for lock in self.driver_locks(name))

    # Trials

    def trial_ids(self) -> list[str]:
        return sorted(name for name in _list_names(self.path / "trials") if _ID.match(name))

    def find_trial(self, prefix: str) -> str:
        """The one trial whose id starts with ``prefix``.

        Raises:
            UsageError: none or several do.
        """
        found = [name for name in self.trial_ids() if name.startswith(prefix)]
        if len(found) == 1 and prefix:
            return found[0]
        if not found:
            raise UsageError(f"trial = {prefix} is not in {self.path}; see `kvlab status SWEEP`")
        raise UsageError(f"trial = {prefix!r} fits {len(found)} trials; give more digits")

    def status(self, trial_id: str) -> Status | None:
        """How a trial ended, None if it has not. Reads a few bytes, whatever the result's size."""
        path = self.trial_directory(trial_id) / "result.json"
        try:
            with open(path, "rb") as file:
                head = _RESULT_HEAD.match(file.read(256))
                file.seek(-min(len(_RESULT_TAIL), os.fstat(file.fileno()).st_size), os.SEEK_END)
                whole = file.read() == _RESULT_TAIL
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; check its rights") from None
        if not head or not whole:
            return "damaged"
        return cast(Status, head.group(1).decode())

    def result(self, trial_id: str) -> dict[str, Any] | None:
        """The whole result, None if there is none.

        Raises:
            StoreError: it is damaged.
        """
        try:
            result: dict[str, Any] = read_json(self.trial_directory(trial_id) / "result.json")
        except FileNotFoundError:
            return None
        return result

    def write_result(self, result: dict[str, Any], fence: Fence | None = None) -> None:
        """Ends a trial. Only the holder of the trial's lock may, and only once.

        Raises:
            LeaseLost: another process has taken the trial over, or has ended it already.
        """
        head = {"schema": SCHEMA, **{key: result[key] for key in ("trial", "training", "status")}}
        path = self.trial_directory(result["trial"]) / "result.json"
        try:
            write_json(path, {**head, **result}, fence=fence, once=True)
        except FileExistsError:
            raise LeaseLost(f"{path} is there already: another process has ended it") from None

    def archive_result(self, trial_id: str) -> None:
        """Moves a result that is to be made again into its last attempt. Needs the lock."""
        directory = self.trial_directory(trial_id)
        target = directory / "attempts" / str(max(self.attempts(trial_id), default=0))
        target.mkdir(parents=True, exist_ok=True)
        for name in ("items.jsonl.gz", "result.json"):
            if (directory / name).exists():
                os.replace(directory / name, target / name)

    def write_trial(
        self, trial_id: str, description: dict[str, Any], fence: Fence | None = None
    ) -> None:
        path = self.trial_directory(trial_id) / "trial.json"
        if not path.exists():
            write_json(path, {"schema": SCHEMA, **description}, fence=fence)

    def write_items(
        self, trial_id: str, items: Iterable[dict[str, Any]], fence: Fence | None = None
    ) -> None:
        """Per-item results, one JSON object a line; the same items give the same bytes."""
        text = "".join(json.dumps(item, allow_nan=False) + "\n" for item in items)
        packed = gzip.compress(text.encode(), mtime=0)
        write_atomic(self.trial_directory(trial_id) / "items.jsonl.gz", packed, fence=fence)

    def items(self, trial_id: str) -> Iterator[dict[str, Any]]:
        """Per-item results, none if the trial has none."""
        path = self.trial_directory(trial_id) / "items.jsonl.gz"
        if path.exists():
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield from map(json.loads, file)

    def items_text(self, trial_id: str) -> bytes:
        """The lines that `items` reads, as they are; empty if the trial has none.

        Raises:
            StoreError: the file is damaged.
        """
        path = self.trial_directory(trial_id) / "items.jsonl.gz"
        try:
            return gzip.decompress(path.read_bytes())
        except FileNotFoundError:
            return b""
        except (OSError, EOFError, zlib.error) as error:
            text = f"{path} cannot be read: {error}"
            raise StoreError(f"{text}; move the trial's result.json away, submit again") from None

    def attempts(self, trial_id: str) -> list[int]:
        names = _list_names(self.trial_directory(trial_id) / "attempts")
        return sorted(int(name) for name in names if name.isdecimal())

    def count_pauses(self, trial_id: str) -> int:
        """How many of its attempts ended at a rung of a search: they lost nothing."""
        found = (self.attempt_directory(trial_id, n) / "paused" for n in self.attempts(trial_id))
        return sum(path.exists() for path in found)

    def attempt_directory(self, trial_id: str, attempt: int) -> Path:
        return self.trial_directory(trial_id) / "attempts" / str(attempt)

    def create_attempt(self, trial_id: str) -> int:
        """Makes the next attempt's directory. Needs the lock."""
        attempt = 1 + max(self.attempts(trial_id), default=0)
        path = self.attempt_directory(trial_id, attempt)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            text = f"{path} cannot be made: {error.strerror}"
            raise StoreError(f"{text}; free or repair the disk, submit again") from None
        return attempt

    def progress(self, trial_id: str) -> dict[str, Any] | None:
        """The last progress that a running trial wrote."""
        try:
            return cast(dict[str, Any], read_json(self.trial_directory(trial_id) / "progress.json"))
        except (FileNotFoundError, StoreError):  # progress is not synced to disk, so may be lost
            return None

    # Trainings

    def is_trained(self, training_id: str) -> bool:
        directory = self.training_directory(training_id)
        weights = directory / "final" / "model.safetensors"
        return (directory / "training.json").exists() and weights.exists()

    def divergence(self, training_id: str) -> str | None:
        """What was said when this training diverged: it would diverge again."""
        try:
            found = read_json(self.training_directory(training_id) / "diverged.json")
            return str(found["message"])
        except FileNotFoundError:
            return None

    def write_divergence(self, training_id: str, message: str, fence: Fence | None = None) -> None:
        path = self.training_directory(training_id) / "diverged.json"
        write_json(path, {"schema": SCHEMA, "message": message}, fence=fence)

    def rungs(self, training_id: str) -> dict[int, float]:
        """Validation losses (nats a token) at the steps after which a search had it pause."""
        try:
            found = read_json(self.training_directory(training_id) / "rungs.json")["rungs"]
            return {int(step): float(facts["loss"]) for step, facts in found.items()}
        except FileNotFoundError:
            return {}

    # Sweeps

    def sweep_names(self) -> list[str]:
        return sorted(
            name
            for name in _list_names(self.path / "sweeps")
            if re.match(NAME_PATTERN, name)
            and (self.path / "sweeps" / name / "sweep.json").exists()
        )

    def sweep(self, name: str) -> dict[str, Any]:
        """What was asked and which trials answer it.

        Raises:
            UsageError: no such sweep was submitted to this store.
        """
        try:
            return cast(dict[str, Any], read_json(self.sweep_directory(name) / "sweep.json"))
        except FileNotFoundError:
            known = ", ".join(self.sweep_names()) or "it has none yet"
            text = f"sweep = {name} is not in the store {self.path} ({known})"
            raise UsageError(f"{text}; submit it first, or name another store") from None

    def write_sweep(self, description: dict[str, Any]) -> None:
        path = self.sweep_directory(description["name"]) / "sweep.json"
        write_json(path, {"schema": SCHEMA, **description})

    def sweep_trials(self, name: str) -> list[str]:
        """Trial ids of a sweep, each once, cell by cell."""
        cells = self.sweep(name)["cells"]
        return list(dict.fromkeys(trial for cell in cells for trial in cell["trials"].values()))

    def results(self, name: str) -> Iterator[dict[str, Any]]:
        """Every readable result of a sweep, one at a time."""
        for trial_id in self.sweep_trials(name):
            with contextlib.suppress(StoreError):  # damaged: `status` says so, submit repeats it
                result = self.result(trial_id)
                if result is not None:
                    yield result


def _check_id(text: str) -> str:
    if not _ID.match(text):
        raise UsageError(f"id = {text!r} is not 16 hex digits")
    return text


def _list_names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be read: {error.strerror}; check its rights"
        ) from None
