"""The record on disk: one directory per trial, with one writer at a time.

    <store>/trainings/<id>/  config.json, start.json, checkpoints/, rungs.json, final/,
                             training.json | diverged.json
    <store>/trunks/<id>/     step-<n>/, checkpoints of a stable phase that token budgets share
    <store>/trials/<id>/     trial.json, progress.json, result.json, items.jsonl.gz,
                             texts.json.gz, tasks.json.gz,
                             attempts/<n>/{log.txt, traceback.txt, repairs.txt, paused}
    <store>/sweeps/<name>/   sweep.json, search.json, points/, reported.json, timings.json, stop,
                             drivers/

Locks lie beside them, as ``lock.<n>`` (`kvlab.fs.lease`).

``result.json`` exists if and only if the trial has ended. Readers ignore names that are not
kvlab's and files that a killed process left unfinished.
"""

import contextlib
import gzip
import io
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

from kvlab.errors import LeaseLost, RecordDamaged, StoreError, UsageError
from kvlab.fs.atomic_files import (
    MAX_JSON_BYTES,
    parse_json,
    read_json,
    read_regular,
    write_atomic,
)
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock, seems_held
from kvlab.fs.sealed_files import (
    FileSeal,
    check_file,
    check_form,
    read_seal,
    read_sealed_bytes,
    read_sealed_json,
    seal_bytes,
    set_aside,
    write_sealed_json,
)
from kvlab.spec.spec_model import NAME_PATTERN, NAME_RULE
from kvlab.store.record_forms import (
    ProgressForm,
    ReportedForm,
    ResultForm,
    RungsForm,
    SweepForm,
    check_cells,
)
from kvlab.store.search_points import SearchPoints, add_points
from kvlab.store.timings import TimingSession, read_timings, replace_times

SCHEMA = 1

Status = Literal["done", "failed", "diverged", "pruned", "damaged"]
"""How a trial ended. ``damaged``: its result is not what was written, and it is run again.
``pruned``: a search has paused its training, which any other sweep continues."""

DETAIL_FILES = ("items.jsonl.gz", "texts.json.gz", "tasks.json.gz")
"""Files beside a result, written before it: HellaSwag by item, losses by document, and lm-eval
tasks by item."""

_ID = re.compile(r"[0-9a-f]{16}\Z")
_TRUNK_STEP = re.compile(r"step-[0-9]{8,}\Z")
_RESULT_HEAD = re.compile(
    rb'\{\s*"schema": %d,\s*"trial": "(\w+)",\s*"training": "\w+",'
    rb'\s*"status": "(done|failed|diverged|pruned)"' % SCHEMA
)

_FILES_KEY = b'\n "files": '  # only a key of the outermost object is indented by one space

TRAINING_FILES = ("training.json", "final", "config.json", "start.json")
"""What a training that is done has recorded, beside its checkpoints."""


class Store:
    """Read and write the record under ``path``. Constructing a store touches nothing on disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            text = f"{path} is a file, and a store is a folder"
            raise StoreError(f"{text}; name another with --store")
        self._seals: dict[str, Mapping[str, FileSeal]] = {}
        self._points: dict[str, SearchPoints] = {}

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

    def trunk_lock(self, trunk_id: str) -> Lock:
        return Lock(self.trunk_directory(trunk_id) / "lock")

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
        """Return how a trial ended, None if it has not. Checks its result and its details."""
        directory = self.trial_directory(trial_id)
        try:
            data = read_sealed_bytes(directory / "result.json")
            head = _RESULT_HEAD.match(data)
            if not head or head.group(1).decode() != trial_id:
                return "damaged"
            for name, seal in _parse_detail_seals(data).items():
                check_file(directory / name, seal)
        except FileNotFoundError:
            return None
        except RecordDamaged:
            return "damaged"
        return cast(Status, head.group(2).decode())

    def result(
        self, trial_id: str, timings: Mapping[str, TimingSession] | None = None
    ) -> dict[str, Any] | None:
        """Return a result, None if there is none.

        Args:
            timings: sessions by trial, from `timings`, whose times replace the first ones.

        Raises:
            RecordDamaged: it is not what was written.
        """
        path = self.trial_directory(trial_id) / "result.json"
        try:
            result = read_sealed_json(path, "schema", "trial", "training", "status")
        except FileNotFoundError:
            return None
        if result["schema"] != SCHEMA:
            raise RecordDamaged(f"{path} is of schema {result['schema']}, not {SCHEMA}")
        check_form(path, result, ResultForm)
        if result["trial"] != trial_id:
            raise RecordDamaged(f"{path} is the result of trial {result['trial']}")
        self._seals[trial_id] = result.get("files", {})
        session = (timings or {}).get(trial_id)
        if session is not None and session.trials[trial_id].result == read_seal(path):
            return replace_times(result, session, session.trials[trial_id])
        return result

    def result_seal(self, trial_id: str) -> str:
        """Return the sha256 of a result.

        Raises:
            RecordDamaged: it is not what was written.
            FileNotFoundError: there is none.
        """
        return read_seal(self.trial_directory(trial_id) / "result.json")

    def check_details(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Check the files that a result lists.

        Raises:
            RecordDamaged: one is missing, or is not what was written.
        """
        for name, seal in result.get("files", {}).items():
            check_file(self.trial_directory(trial_id) / name, seal)

    def write_result(self, result: dict[str, Any], fence: Fence | None = None) -> None:
        """Write the result that ends a trial. Requires the trial's lock.

        Args:
            result: see `kvlab.store.result`; with details, ``files`` is their seals, from
                `write_details`.

        Raises:
            LeaseLost: another process has taken over the trial, or has ended it already.
        """
        head = {"schema": SCHEMA, **{key: result[key] for key in ("trial", "training", "status")}}
        path = self.trial_directory(result["trial"]) / "result.json"
        try:
            files = {"files": result["files"]} if "files" in result else {}
            content = {**head, **{k: v for k, v in result.items() if k != "files"}, **files}
            write_sealed_json(path, content, fence=fence, once=True)
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

    def set_aside_result(self, trial_id: str, fence: Fence | None = None) -> Path:
        """Move a damaged result into ``damaged/``, so that the trial runs again.

        Requires the trial's lock.

        Returns:
            The folder that it is moved to.
        """
        names = (*DETAIL_FILES, "result.json")
        return set_aside(self.trial_directory(trial_id), names, fence)

    def write_trial(
        self, trial_id: str, description: dict[str, Any], fence: Fence | None = None
    ) -> None:
        """Write what is known of a trial before it runs, unless it is there already."""
        path = self.trial_directory(trial_id) / "trial.json"
        try:
            recorded = read_sealed_json(path, "trial")["trial"]
        except (FileNotFoundError, RecordDamaged):
            recorded = None
        if recorded == trial_id:
            return
        if path.exists():
            set_aside(path.parent, [path.name], fence)
        write_sealed_json(path, {"schema": SCHEMA, **description}, fence=fence)

    def read_training_id(self, trial_id: str) -> str | None:
        """Return the training of a trial, from its ``trial.json``; None if that is unreadable."""
        return self._read_trial_key(trial_id, "training")

    def read_trunk_id(self, trial_id: str) -> str | None:
        """Return the trunk that a trial's training may branch from; None without any."""
        return self._read_trial_key(trial_id, "trunk")

    def _read_trial_key(self, trial_id: str, key: str) -> str | None:
        for name in ("trial.json", "result.json"):  # the first may be damaged or gone
            with contextlib.suppress(FileNotFoundError, StoreError, KeyError):
                return str(read_sealed_json(self.trial_directory(trial_id) / name)[key])
        return None

    def write_details(
        self,
        trial_id: str,
        *,
        items: Iterable[Mapping[str, Any]] = (),
        texts: Mapping[str, Any] | None = None,
        tasks: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
    ) -> dict[str, FileSeal]:
        """Write what lies beside a result. Equal details give equal bytes.

        Args:
            items: HellaSwag by item.
            texts: losses by document, see `texts`.
            tasks: outcomes on lm-eval tasks, see `tasks`.

        Returns:
            The seals of the files, which the result lists under ``files``.
        """
        lines = "".join(json.dumps(item, allow_nan=False) + "\n" for item in items)
        contents = {
            name: json.dumps(value, allow_nan=False) if value else ""
            for name, value in (("texts.json.gz", texts), ("tasks.json.gz", tasks))
        }
        seals = {}
        for name, text in {"items.jsonl.gz": lines, **contents}.items():
            if text:
                data = gzip.compress(text.encode(), mtime=0)
                write_atomic(self.trial_directory(trial_id) / name, data, fence=fence)
                seals[name] = seal_bytes(data)
        return seals

    def items(self, trial_id: str) -> Iterator[dict[str, Any]]:
        """Iterate over HellaSwag by item; empty if the trial has none.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        path = self.trial_directory(trial_id) / "items.jsonl.gz"
        for line in self.items_text(trial_id).splitlines():
            yield _parse_detail(path, line)

    def items_text(self, trial_id: str) -> bytes:
        """Return the lines that `items` reads; empty if the trial has none.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        return self._read_detail(trial_id, "items.jsonl.gz")

    def texts(self, trial_id: str) -> dict[str, dict[str, list[float]]]:
        """Return a trial's losses by document; empty if it has none.

        Trials that are scored on the same text have the same documents and tokens.

        Returns:
            By ``loss`` and, where the trial was served, ``served``: lists of equal length.
            ``documents``, indices of held-out documents; ``tokens``, how many of each were scored;
            ``nats``, the sum of their losses; of ``served`` also ``one_shot_nats``, the sum of the
            one-shot losses of the same tokens.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        return cast(
            dict[str, dict[str, list[float]]], self._read_mapping(trial_id, "texts.json.gz")
        )

    def tasks(self, trial_id: str) -> dict[str, Any]:
        """Return a trial's outcomes on lm-eval tasks; empty if it has none.

        Returns:
            By task: ``harness``, the version of lm-eval; ``version``, that of the task; ``items``,
            a digest of the items; ``outcomes``, by metric one number for each item.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        return self._read_mapping(trial_id, "tasks.json.gz")

    def _read_mapping(self, trial_id: str, name: str) -> dict[str, Any]:
        """Return the JSON object in a file that the result lists; empty if it does not."""
        text = self._read_detail(trial_id, name) or b"{}"
        return _parse_detail(self.trial_directory(trial_id) / name, text)

    def _read_detail(self, trial_id: str, name: str) -> bytes:
        """Return the decompressed contents of a file that the result lists; empty if it does not.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        seal = self._detail_seals(trial_id).get(name)
        if seal is None:
            return b""
        path = self.trial_directory(trial_id) / name
        try:
            data = read_regular(path)
        except OSError:
            data = b""
        if seal_bytes(data) != seal:
            # another process may have run the trial again since its result was read
            self._seals.pop(trial_id, None)
            seal = self._detail_seals(trial_id).get(name)
            if seal is None:
                return b""
            check_file(path, seal)
            data = read_regular(path)
        return _decompress(path, data)

    def _detail_seals(self, trial_id: str) -> Mapping[str, FileSeal]:
        if trial_id not in self._seals and self.result(trial_id) is None:
            return {}
        return self._seals[trial_id]

    def attempts(self, trial_id: str) -> list[int]:
        """Return the numbers of a trial's attempts, sorted."""
        names = _list_names(self.trial_directory(trial_id) / "attempts")
        return sorted(int(name) for name in names if name.isdecimal())

    def count_pauses(self, trial_id: str) -> int:
        """Return how many attempts ended at a rung of a search, with nothing lost."""
        paths = (self.attempt_directory(trial_id, n) / "paused" for n in self.attempts(trial_id))
        return sum(path.exists() for path in paths)

    def repairs(self, trial_id: str) -> list[str]:
        """Return what the last attempt at a trial found damaged and made again, one line each."""
        last = max(self.attempts(trial_id), default=0)
        try:
            text = (self.attempt_directory(trial_id, last) / "repairs.txt").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        return text.splitlines()

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
        path = self.trial_directory(trial_id) / "progress.json"
        try:
            progress = read_json(path)
            check_form(path, progress, ProgressForm)
        except (FileNotFoundError, StoreError):  # not synced, so it may be lost
            return None
        return cast(dict[str, Any], progress)

    # Trainings

    def is_trained(self, training_id: str) -> bool:
        """Return whether a training is done and its final weights are there.

        Its record is checked; of the weights only the size is, since whoever loads them checks
        what they contain.
        """
        directory = self.training_directory(training_id)
        paths = (directory / "training.json", directory / "final" / "model.safetensors")
        return all(path.exists() for path in paths) and self.check_training(training_id) is None

    def check_training(self, training_id: str, *, contents: bool = False) -> str | None:
        """Return what is wrong with the files of a training that has ended.

        Args:
            contents: read the weights; otherwise only their size is compared.

        Returns:
            None if nothing is, or if it has not ended. Weights that are gone are no damage.
        """
        directory = self.training_directory(training_id)
        try:
            record = read_sealed_json(directory / "training.json", "files")
            for name, seal in record["files"].items():
                is_weights = not name.endswith(".json")
                if is_weights and not (directory / name).exists():
                    continue  # garbage collection removes weights that have been measured
                check_file(directory / name, seal, contents=contents or not is_weights)
        except FileNotFoundError:
            return None
        except RecordDamaged as error:
            return str(error)
        return None

    def set_aside_training(self, training_id: str, fence: Fence | None = None) -> Path:
        """Move what a training has recorded of its end into ``damaged/``, so that it runs again.

        Its checkpoints stay. Requires the training's lock.

        Returns:
            The folder that it is moved to.
        """
        return set_aside(self.training_directory(training_id), TRAINING_FILES, fence)

    def earlier_training_record(self, training_id: str) -> bytes | None:
        """Return the whole record of a training whose weights are gone; None if there is none.

        It is where it was written, or where `set_aside_training` has moved it.
        """
        directory = self.training_directory(training_id)
        numbers = [int(name) for name in _list_names(directory / "damaged") if name.isdecimal()]
        aside = [directory / "damaged" / str(n) for n in sorted(numbers, reverse=True)]
        for folder in (directory, *aside):
            with contextlib.suppress(FileNotFoundError, RecordDamaged):
                read_sealed_json(folder / "training.json", "files")
                return read_sealed_bytes(folder / "training.json")
        return None

    def training_seals(self, training_id: str) -> dict[str, FileSeal]:
        """Return the seals of a finished training's files; empty if it has no record.

        Raises:
            RecordDamaged: the record is not what was written.
        """
        try:
            path = self.training_directory(training_id) / "training.json"
            return cast(dict[str, FileSeal], read_sealed_json(path, "files")["files"])
        except FileNotFoundError:
            return {}

    def training_seal(self, training_id: str) -> str | None:
        """Return the sha256 of a finished training's record; None if it has none."""
        try:
            return read_seal(self.training_directory(training_id) / "training.json")
        except FileNotFoundError:
            return None

    def divergence(self, training_id: str) -> str | None:
        """Return the message of a training that diverged, None if it has not.

        A damaged record is None, too: the training is run again.
        """
        try:
            path = self.training_directory(training_id) / "diverged.json"
            return str(read_sealed_json(path, "message")["message"])
        except (FileNotFoundError, RecordDamaged):
            return None

    def write_divergence(self, training_id: str, message: str, fence: Fence | None = None) -> None:
        path = self.training_directory(training_id) / "diverged.json"
        write_sealed_json(path, {"schema": SCHEMA, "message": message}, fence=fence)

    def rungs(self, training_id: str) -> dict[int, float]:
        """Return validation losses (nats/token) by the steps after which a search paused it."""
        try:
            path = self.training_directory(training_id) / "rungs.json"
            content = read_sealed_json(path, "rungs")
            check_form(path, content, RungsForm)
        except (FileNotFoundError, RecordDamaged):  # damaged ones are measured again
            return {}
        return {int(step): float(rung["loss"]) for step, rung in content["rungs"].items()}

    def check_checkpoint(self, folder: Path) -> dict[str, FileSeal]:
        """Check a checkpoint and return the seals of its files, ``state.json`` aside.

        Raises:
            RecordDamaged: a file is not what was written, or is missing.
        """
        try:
            files = read_sealed_json(folder / "state.json", "files", "state")["files"]
        except FileNotFoundError:
            raise RecordDamaged(f"{folder / 'state.json'} is missing") from None
        for name, seal in files.items():
            check_file(folder / name, seal)
        return cast(dict[str, FileSeal], files)

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

        That of a search has the suggestions so far, each with its level and its cell.

        Raises:
            UsageError: no such sweep was submitted to this store.
            RecordDamaged: the description is not what was written.
        """
        path = self.sweep_directory(name) / "sweep.json"
        try:
            sweep = read_sealed_json(path, "name", "cells")
            check_form(path, sweep, SweepForm)
            check_cells(path, sweep)
            if sweep["name"] != name:
                raise RecordDamaged(f"{path} describes the sweep {sweep['name']}")
            points = self.search_points(name).read() if "search" in sweep else []
            if not points:
                return sweep
            with contextlib.suppress(FileNotFoundError):
                spent = read_sealed_json(path.with_name("search.json"), "seconds", "flops")
                facts = {"spent_seconds": spent["seconds"], "spent_flops": spent["flops"]}
                sweep = {**sweep, "search": {**sweep["search"], **facts}}
            return add_points(sweep, points)
        except RecordDamaged as error:
            hint = "submit the sweep again, which writes it anew"
            raise RecordDamaged(f"{error}; {hint}") from None
        except FileNotFoundError:
            names = self.sweep_names()
            near = get_close_matches(name, names, 1)
            text = f"sweep = {name} is not in the store {self.path}"
            text = f"{text} ({', '.join(names) or 'it has none yet'})"
            hint = f"did you mean {near[0]}?" if near else "submit it first, or name another store"
            raise UsageError(f"{text}; {hint}") from None

    def search_points(self, name: str) -> SearchPoints:
        """Return the suggestions of a search."""
        return self._points.setdefault(name, SearchPoints(self.sweep_directory(name)))

    def write_sweep(self, description: dict[str, Any]) -> None:
        path = self.sweep_directory(description["name"]) / "sweep.json"
        write_sealed_json(path, {"schema": SCHEMA, **description})

    def note_report(self, name: str, seeds: Iterable[int]) -> None:
        """Note that a report has shown what these seeds decide, for as far as this can be written.

        Seeds that are added later are recognized by it.
        """
        reported, new = self.reported_seeds(name), sorted(seeds)
        if new not in reported:
            path = self.sweep_directory(name) / "reported.json"
            with contextlib.suppress(OSError, StoreError):  # a store that others may only read
                write_sealed_json(path, {"schema": SCHEMA, "seeds": [*reported, new]})

    def reported_seeds(self, name: str) -> list[list[int]]:
        """Return the sets of seeds at which reports were written."""
        try:
            path = self.sweep_directory(name) / "reported.json"
            reported = read_sealed_json(path, "seeds")
            check_form(path, reported, ReportedForm)
        except (FileNotFoundError, RecordDamaged):  # `kvlab verify` tells of a damaged one
            return []
        return [list(seeds) for seeds in reported["seeds"]]

    def timings(self, name: str) -> dict[str, TimingSession]:
        """Return, by trial, the session in which a trial of this sweep was timed again."""
        sessions = read_timings(self.sweep_directory(name))
        return {trial: session for session in sessions for trial in session.trials}

    def sweep_trials(self, name: str) -> list[str]:
        """Return the trial ids of a sweep, each once, cell by cell."""
        cells = list_cells(self.sweep(name))
        return list(dict.fromkeys(trial for cell in cells for trial in cell["trials"].values()))

    def results(self, name: str) -> Iterator[dict[str, Any]]:
        """Iterate over the readable results of a sweep."""
        timings = self.timings(name)
        for trial_id in self.sweep_trials(name):
            with contextlib.suppress(StoreError):  # damaged, see `status`
                result = self.result(trial_id, timings)
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


def _decompress(path: Path, data: bytes) -> bytes:
    """Return the contents of a gzip file, which may be `MAX_JSON_BYTES` at most."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordDamaged(f"{path} is damaged: {error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise RecordDamaged(f"{path} is damaged: it unpacks to more than {MAX_JSON_BYTES:,} bytes")
    return text


def _parse_detail(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise RecordDamaged(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RecordDamaged(f"{path} is damaged: it has no object")
    return value


def _parse_detail_seals(data: bytes) -> Mapping[str, FileSeal]:
    """Return the key ``files`` of a result, near its end, without parsing the rest."""
    start = data.rfind(_FILES_KEY)
    if start < 0:
        return {}
    text = data[start + len(_FILES_KEY) :].decode()
    return cast(Mapping[str, FileSeal], json.JSONDecoder().raw_decode(text)[0])


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
