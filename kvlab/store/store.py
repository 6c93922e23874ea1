"""The record on disk: one directory per trial, with one writer at a time.

    <store>/trainings/<id>/  config.json, start.json, checkpoints/, rungs.json, final/,
                             training.json | diverged.json
    <store>/trunks/<id>/     step-<n>/, checkpoints of a stable phase that token budgets share
    <store>/trials/<id>/     trial.json, progress.json, result.json, items.jsonl.gz,
                             texts.json.gz, tasks.json.gz,
                             attempts/<n>/{log.txt, traceback.txt, paused}
    <store>/sweeps/<name>/   sweep.json, search.json, reported.json, stop, drivers/

Locks lie beside them, as ``lock.<n>`` (`kvlab.fs.lease`).

``result.json`` exists if and only if the trial has ended. Readers ignore names that are not
kvlab's and files that a killed process left unfinished.
"""

import contextlib
import gzip
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

from kvlab.errors import LeaseLost, StoreError, UsageError
from kvlab.fs.atomic_files import read_json, write_atomic, write_json
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock, seems_held
from kvlab.spec.spec_model import NAME_PATTERN, NAME_RULE

SCHEMA = 1

Status = Literal["done", "failed", "diverged", "pruned", "damaged"]
"""How a trial ended. ``damaged``: its result cannot be read, and it is run again. ``pruned``: a
search has paused its training, which any other sweep continues."""

DETAIL_FILES = ("items.jsonl.gz", "texts.json.gz", "tasks.json.gz")
"""Files beside a result, written before it: HellaSwag by item, losses by document, and lm-eval
tasks by item."""

_ID = re.compile(r"[0-9a-f]{16}\Z")
_TRUNK_STEP = re.compile(r"step-[0-9]{8,}\Z")
_RESULT_HEAD = re.compile(
    rb'\{\s*"schema": %d,\s*"trial": "\w+",\s*"training": "\w+",'
    rb'\s*"status": "(done|failed|diverged|pruned)"' % SCHEMA
)

_RESULT_TAIL = b"\n}\n"  # only the outermost brace is at the start of a line


class Store:
    """Read and write the record under ``path``. Constructing a store touches nothing on disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            text = f"{path} is a file, and a store is a folder"
            raise StoreError(f"{text}; name another with --store")

    # Paths

    def trial_directory(self, trial_id: str) -> Path:
        return self.path / "trials" / _check_id(trial_id)

    def training_directory(self, training_id: str) -> Path:
        return self.path / "trainings" / _check_id(training_id)

    def trunk_directory(self, trunk_id: str) -> Path:
        return self.path / "trunks" / _check_id(trunk_id)

    def sweep_directory(self, name: str) -> Path:
        if not re.match(NAME_PATTERN, name) or name.endswith("\n"):
            raise UsageError(f"sweep = {name!r} is not a name; {NAME_RULE}")
        return self.path / "sweeps" / name

    def stop_flag(self, name: str) -> Path:
        """Return the file whose presence asks all trials of a sweep to stop."""
        return self.sweep_directory(name) / "stop"

    def new_driver_stop_flag(self, name: str) -> Path:
        """Return a new path for the file that asks the trials of one driver to stop."""
        return self.sweep_directory(name) / "drivers" / f"{secrets.token_hex(8)}.stop"

    # Locks

    def trial_lock(self, trial_id: str) -> Lock:
        return Lock(self.trial_directory(trial_id) / "lock")

    def training_lock(self, training_id: str) -> Lock:
        return Lock(self.training_directory(training_id) / "lock")

    def report_lock(self, name: str) -> Lock:
        return Lock(self.sweep_directory(name) / "report")

    def driver_lock(self, name: str) -> Lock:
        """Return a new lock that a driver holds while it runs; a sweep may have several drivers."""
        path = self.sweep_directory(name) / "drivers" / secrets.token_hex(8)
        return Lock(path, remove_on_release=True)

    def driver_locks(self, name: str) -> Iterator[Lock]:
        """Iterate over the locks of all drivers, running or not."""
        folder = self.sweep_directory(name) / "drivers"
        for driver in sorted({file.partition(".")[0] for file in _list_names(folder)}):
            if _ID.match(driver):
                yield Lock(folder / driver)

    def is_running(self, trial_id: str) -> bool:
        return seems_held(self.trial_directory(trial_id) / "lock")

    def is_driven(self, name: str) -> bool:
        """Return whether a driver runs this sweep now."""
        return any(seems_held(lock.path) for lock in self.driver_locks(name))

    # Trials

    def trial_ids(self) -> list[str]:
        return sorted(name for name in _list_names(self.path / "trials") if _ID.match(name))

    def find_trial(self, prefix: str) -> str:
        """Return the id of the one trial that starts with ``prefix``.

        Raises:
            UsageError: none or several do.
        """
        matches = [name for name in self.trial_ids() if name.startswith(prefix)]
        if len(matches) == 1 and prefix:
            return matches[0]
        if not matches:
            raise UsageError(f"trial = {prefix} is not in {self.path}; see `kvlab status SWEEP`")
        raise UsageError(f"trial = {prefix!r} fits {len(matches)} trials; give more digits")

    def status(self, trial_id: str) -> Status | None:
        """Return how a trial ended, None if it has not. Reads the first and last bytes only."""
        path = self.trial_directory(trial_id) / "result.json"
        try:
            with open(path, "rb") as file:
                head = _RESULT_HEAD.match(file.read(256))
                file.seek(-min(len(_RESULT_TAIL), os.fstat(file.fileno()).st_size), os.SEEK_END)
                is_complete = file.read() == _RESULT_TAIL
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}"
            raise StoreError(f"{text}; check its permissions") from None
        if not head or not is_complete:
            return "damaged"
        return cast(Status, head.group(1).decode())

    def result(self, trial_id: str) -> dict[str, Any] | None:
        """Return a result, None if there is none.

        Raises:
            StoreError: it is damaged.
        """
        try:
            result: dict[str, Any] = read_json(self.trial_directory(trial_id) / "result.json")
        except FileNotFoundError:
            return None
        return result

    def write_result(self, result: dict[str, Any], fence: Fence | None = None) -> None:
        """Write the result that ends a trial. Requires the trial's lock.

        Raises:
            LeaseLost: another process has taken over the trial, or has ended it already.
        """
        head = {"schema": SCHEMA, **{key: result[key] for key in ("trial", "training", "status")}}
        path = self.trial_directory(result["trial"]) / "result.json"
        try:
            write_json(path, {**head, **result}, fence=fence, once=True)
        except FileExistsError:
            raise LeaseLost(f"{path} exists already: another process has ended the trial") from None

    def archive_result(self, trial_id: str) -> None:
        """Move a result into its last attempt, so that the trial runs again. Requires the lock."""
        directory = self.trial_directory(trial_id)
        target = directory / "attempts" / str(max(self.attempts(trial_id), default=0))
        target.mkdir(parents=True, exist_ok=True)
        for name in (*DETAIL_FILES, "result.json"):
            if (directory / name).exists():
                os.replace(directory / name, target / name)

    def write_trial(
        self, trial_id: str, description: dict[str, Any], fence: Fence | None = None
    ) -> None:
        path = self.trial_directory(trial_id) / "trial.json"
        if not path.exists():
            write_json(path, {"schema": SCHEMA, **description}, fence=fence)

    def read_training_id(self, trial_id: str) -> str | None:
        """Return the training of a trial, from its ``trial.json``; None if that is unreadable."""
        return self._read_trial_key(trial_id, "training")

    def read_trunk_id(self, trial_id: str) -> str | None:
        """Return the trunk that a trial's training may branch from; None without any."""
        return self._read_trial_key(trial_id, "trunk")

    def _read_trial_key(self, trial_id: str, key: str) -> str | None:
        try:
            return str(read_json(self.trial_directory(trial_id) / "trial.json")[key])
        except (FileNotFoundError, StoreError, KeyError, TypeError):
            return None

    def write_items(
        self, trial_id: str, items: Iterable[dict[str, Any]], fence: Fence | None = None
    ) -> None:
        """Write per-item results, one JSON object per line; equal items give equal bytes."""
        text = "".join(json.dumps(item, allow_nan=False) + "\n" for item in items)
        data = gzip.compress(text.encode(), mtime=0)
        write_atomic(self.trial_directory(trial_id) / "items.jsonl.gz", data, fence=fence)

    def items(self, trial_id: str) -> Iterator[dict[str, Any]]:
        """Iterate over per-item results; empty if the trial has none."""
        path = self.trial_directory(trial_id) / "items.jsonl.gz"
        if path.exists():
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield from map(json.loads, file)

    def items_text(self, trial_id: str) -> bytes:
        """Return the lines that `items` reads; empty if the trial has none.

        Raises:
            StoreError: the file is damaged.
        """
        return self._decompress(trial_id, "items.jsonl.gz")

    def write_texts(
        self,
        trial_id: str,
        texts: Mapping[str, Mapping[str, list[float]]],
        fence: Fence | None = None,
    ) -> None:
        """Write losses by document; equal losses give equal bytes."""
        data = gzip.compress(json.dumps(texts, allow_nan=False).encode(), mtime=0)
        write_atomic(self.trial_directory(trial_id) / "texts.json.gz", data, fence=fence)

    def texts(self, trial_id: str) -> dict[str, dict[str, list[float]]]:
        """Return a trial's losses by document; empty if it has none.

        Trials that are scored on the same text have the same documents and tokens.

        Returns:
            By ``loss`` and, where the trial was served, ``served``: lists of equal length.
            ``documents``, indices of held-out documents; ``tokens``, how many of each were scored;
            ``nats``, the sum of their losses; of ``served`` also ``one_shot_nats``, the sum of the
            one-shot losses of the same tokens.

        Raises:
            StoreError: the file is damaged.
        """
        texts = self._read_detail(trial_id, "texts.json.gz")
        return cast(dict[str, dict[str, list[float]]], texts)

    def write_tasks(
        self, trial_id: str, tasks: Mapping[str, Any], fence: Fence | None = None
    ) -> None:
        """Write outcomes on lm-eval tasks; equal outcomes give equal bytes."""
        data = gzip.compress(json.dumps(tasks, allow_nan=False).encode(), mtime=0)
        write_atomic(self.trial_directory(trial_id) / "tasks.json.gz", data, fence=fence)

    def tasks(self, trial_id: str) -> dict[str, Any]:
        """Return a trial's outcomes on lm-eval tasks; empty if it has none.

        Returns:
            By task: ``harness``, the version of lm-eval; ``version``, that of the task; ``items``,
            a digest of the items; ``outcomes``, by metric one number for each item.

        Raises:
            StoreError: the file is damaged.
        """
        return self._read_detail(trial_id, "tasks.json.gz")

    def _read_detail(self, trial_id: str, name: str) -> dict[str, Any]:
        data = self._decompress(trial_id, name)
        try:
            return cast(dict[str, Any], json.loads(data or b"{}"))
        except ValueError as error:
            raise _damaged_detail(self.trial_directory(trial_id) / name, error) from None

    def _decompress(self, trial_id: str, name: str) -> bytes:
        path = self.trial_directory(trial_id) / name
        try:
            return gzip.decompress(path.read_bytes())
        except FileNotFoundError:
            return b""
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged_detail(path, error) from None

    def attempts(self, trial_id: str) -> list[int]:
        """Return the numbers of a trial's attempts, sorted."""
        names = _list_names(self.trial_directory(trial_id) / "attempts")
        return sorted(int(name) for name in names if name.isdecimal())

    def count_pauses(self, trial_id: str) -> int:
        """Return how many attempts ended at a rung of a search, with nothing lost."""
        paths = (self.attempt_directory(trial_id, n) / "paused" for n in self.attempts(trial_id))
        return sum(path.exists() for path in paths)

    def attempt_directory(self, trial_id: str, attempt: int) -> Path:
        return self.trial_directory(trial_id) / "attempts" / str(attempt)

    def create_attempt(self, trial_id: str) -> int:
        """Create the next attempt's directory and return its number. Requires the lock."""
        attempt = 1 + max(self.attempts(trial_id), default=0)
        path = self.attempt_directory(trial_id, attempt)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            text = f"{path} cannot be created: {error.strerror}"
            raise StoreError(f"{text}; free or repair the disk, submit again") from None
        return attempt

    def progress(self, trial_id: str) -> dict[str, Any] | None:
        """Return the last progress that a running trial wrote, None if there is none."""
        try:
            return cast(dict[str, Any], read_json(self.trial_directory(trial_id) / "progress.json"))
        except (FileNotFoundError, StoreError):  # not synced, so it may be lost
            return None

    # Trainings

    def is_trained(self, training_id: str) -> bool:
        """Return whether a training is done and its final weights are there."""
        directory = self.training_directory(training_id)
        weights = directory / "final" / "model.safetensors"
        return (directory / "training.json").exists() and weights.exists()

    def divergence(self, training_id: str) -> str | None:
        """Return the message of a training that diverged, None if it has not."""
        try:
            record = read_json(self.training_directory(training_id) / "diverged.json")
            return str(record["message"])
        except FileNotFoundError:
            return None

    def write_divergence(self, training_id: str, message: str, fence: Fence | None = None) -> None:
        path = self.training_directory(training_id) / "diverged.json"
        write_json(path, {"schema": SCHEMA, "message": message}, fence=fence)

    def rungs(self, training_id: str) -> dict[int, float]:
        """Return validation losses (nats/token) by the steps after which a search paused it."""
        try:
            rungs = read_json(self.training_directory(training_id) / "rungs.json")["rungs"]
            return {int(step): float(rung["loss"]) for step, rung in rungs.items()}
        except FileNotFoundError:
            return {}

    def trunk_steps(self, trunk_id: str) -> list[int]:
        """Return the steps after which a trunk has a checkpoint, sorted; see `kvlab.train`."""
        names = _list_names(self.trunk_directory(trunk_id))
        return sorted(int(name[5:]) for name in names if _TRUNK_STEP.match(name))

    # Sweeps

    def sweep_names(self) -> list[str]:
        return sorted(
            name
            for name in _list_names(self.path / "sweeps")
            if re.match(NAME_PATTERN, name)
            and (self.path / "sweeps" / name / "sweep.json").exists()
        )

    def sweep(self, name: str) -> dict[str, Any]:
        """Return a sweep's description: the question, its factors, its cells and their trials.

        Raises:
            UsageError: no such sweep was submitted to this store.
        """
        try:
            return cast(dict[str, Any], read_json(self.sweep_directory(name) / "sweep.json"))
        except FileNotFoundError:
            names = self.sweep_names()
            near = get_close_matches(name, names, 1)
            text = f"sweep = {name} is not in the store {self.path}"
            text = f"{text} ({', '.join(names) or 'it has none yet'})"
            hint = f"did you mean {near[0]}?" if near else "submit it first, or name another store"
            raise UsageError(f"{text}; {hint}") from None

    def write_sweep(self, description: dict[str, Any]) -> None:
        path = self.sweep_directory(description["name"]) / "sweep.json"
        write_json(path, {"schema": SCHEMA, **description})

    def note_report(self, name: str, seeds: Iterable[int]) -> None:
        """Note that a report has shown what these seeds decide, for as far as this can be written.

        Seeds that are added later are recognized by it.
        """
        reported, new = self.reported_seeds(name), sorted(seeds)
        if new not in reported:
            path = self.sweep_directory(name) / "reported.json"
            with contextlib.suppress(OSError, StoreError):  # a store that others may only read
                write_json(path, {"schema": SCHEMA, "seeds": [*reported, new]})

    def reported_seeds(self, name: str) -> list[list[int]]:
        """Return the sets of seeds at which reports were written."""
        try:
            reported = read_json(self.sweep_directory(name) / "reported.json")
        except FileNotFoundError:
            return []
        return [list(seeds) for seeds in reported["seeds"]]

    def sweep_trials(self, name: str) -> list[str]:
        """Return the trial ids of a sweep, each once, cell by cell."""
        cells = list_cells(self.sweep(name))
        return list(dict.fromkeys(trial for cell in cells for trial in cell["trials"].values()))

    def results(self, name: str) -> Iterator[dict[str, Any]]:
        """Iterate over the readable results of a sweep."""
        for trial_id in self.sweep_trials(name):
            with contextlib.suppress(StoreError):  # damaged, see `status`
                result = self.result(trial_id)
                if result is not None:
                    yield result


def list_cells(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a sweep's description, first those in which settings were tuned.

    Args:
        sweep: The content of ``sweep.json``.

    Returns:
        For each cell its levels and its trials by seed. A tuned setting is one more level.
    """
    return [*(sweep.get("tuning") or {}).get("cells", ()), *sweep["cells"]]


def _damaged_detail(path: Path, error: Exception) -> StoreError:
    text = f"{path} cannot be read: {error}"
    return StoreError(f"{text}; move the trial's result.json away, submit again")


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
        text = f"{directory} cannot be read: {error.strerror}"
        raise StoreError(f"{text}; check its permissions") from None
