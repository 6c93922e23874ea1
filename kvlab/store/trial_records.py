"""Read and write what the store has of each trial: result, details, attempts."""

import contextlib
import gzip
import io
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from kvlab.errors import LeaseLost, RecordDamaged, StoreError, UsageError
from kvlab.fs import atomic_files, sealed_files
from kvlab.fs.atomic_files import MAX_JSON_BYTES
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import FileSeal, write_sealed_json
from kvlab.own_extensions import load_parts
from kvlab.store.record_forms import SCHEMA, EndStatus, ProgressForm, read_record
from kvlab.store.store_paths import ID_PATTERN, StorePaths, list_names
from kvlab.store.timings import TimingSession, replace_times

Status = EndStatus | Literal["damaged"]
"""``damaged``: the result is not what was written, and the trial is run again."""

_DETAILS = ("texts", *(name for parts in load_parts().values() for name in parts.details))

DETAIL_FILES = ("items.jsonl.gz", *(f"{name}.json.gz" for name in _DETAILS))
"""Files beside a result, written before it: HellaSwag by item, losses by document, and what
evaluations of extensions keep."""

_CLOCK_TICK_NS = 2_000_000_000
"""A file that is younger may change without another time: that of a file has ticks."""

RESULT_FILES = (*DETAIL_FILES, "result.json")
"""What is moved together when a trial is to run again."""


@dataclass(frozen=True)
class _End:
    """What was read of a trial that has ended: its files' stamp, the seals of its details, and the
    code that it names."""

    stamp: tuple[tuple[int, int, int], ...]
    status: Status
    files: Mapping[str, FileSeal] = field(default_factory=dict)
    code: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, stamp: tuple[tuple[int, int, int], ...], result: Mapping[str, Any]) -> "_End":
        code = (result.get("provenance") or {}).get("code")
        return cls(stamp, result["status"], result.get("files", {}), code)


class TrialRecords(StorePaths):
    """The trials of a store, each in its directory."""

    _ends: dict[str, _End]

    def trial_ids(self) -> list[str]:
        return sorted(name for name in list_names(self.path / "trials") if ID_PATTERN.match(name))

    def find_trial(self, prefix: str) -> str:
        """Return the id of the one trial that starts with ``prefix``.

        Raises:
            UsageError: none or several do.
        """
        matches = [name for name in self.trial_ids() if name.startswith(prefix)]
        if not matches:
            raise UsageError(f"trial = {prefix} is not in {self.path}; see `kvlab status SWEEP`")
        if len(matches) == 1 and prefix:
            return matches[0]
        raise UsageError(f"trial = {prefix!r} fits {len(matches)} trials; give more digits")

    def status(self, trial_id: str) -> Status | None:
        """Return how a trial ended, None if it has not.

        What `verify_record` finds damaged is damaged here. The files are read again when one of
        them has another inode, size or time.
        """
        end = self._end(trial_id)
        return None if end is None else end.status

    def code(self, trial_id: str) -> Mapping[str, Any] | None:
        """Return the digests of the code of a trial that has ended, as its result has them.

        Returns:
            See `kvlab.trial.code_identity`; None if it does not name its code.
        """
        end = self._end(trial_id)
        return None if end is None else end.code

    def _end(self, trial_id: str) -> _End | None:
        """Return what is known of a trial that has ended; read again if a file has changed."""
        stamp, end = self._stamp(trial_id), self._ends.get(trial_id)
        if end is not None and end.stamp == stamp:
            return end
        try:
            result = self.result(trial_id)
        except RecordDamaged:
            self._remember(trial_id, damaged := _End(stamp, "damaged"))
            return damaged
        return None if result is None else _End.of(stamp, result)

    def result(
        self, trial_id: str, timings: Mapping[str, TimingSession] | None = None
    ) -> dict[str, Any] | None:
        """Return a result, None if there is none.

        Args:
            timings: sessions by trial, from `timings`, whose times replace the first ones.

        Raises:
            RecordDamaged: it, or a file that it lists, is not what was written.
        """
        path, stamp = self.trial_directory(trial_id) / "result.json", self._stamp(trial_id)
        try:
            result = read_record(path)
        except FileNotFoundError:
            return None
        end = _End.of(stamp, result)
        if self._ends.get(trial_id) != end:
            for name, seal in end.files.items():
                sealed_files.check_file(path.with_name(name), seal)
            self._remember(trial_id, end)
        session = (timings or {}).get(trial_id)
        if session is not None and session.trials[trial_id].result == sealed_files.read_seal(path):
            return replace_times(result, session, session.trials[trial_id])
        return result

    def _stamp(self, trial_id: str) -> tuple[tuple[int, int, int], ...]:
        """Return time, inode and size of the files that a trial ends with."""
        stamp = []
        for name in RESULT_FILES:
            with contextlib.suppress(OSError):
                state = os.stat(self.trial_directory(trial_id) / name)
                stamp.append((state.st_mtime_ns, state.st_ino, state.st_size))
        return tuple(stamp)

    def _remember(self, trial_id: str, end: "_End") -> None:
        if end.stamp and time.time_ns() - max(end.stamp)[0] > _CLOCK_TICK_NS:
            self._ends[trial_id] = end

    def result_seal(self, trial_id: str) -> str:
        """Return the sha256 of a result.

        Raises:
            RecordDamaged: it is not what was written.
            FileNotFoundError: there is none.
        """
        return sealed_files.read_seal(self.trial_directory(trial_id) / "result.json")

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
        for name in RESULT_FILES:
            if (directory / name).exists():
                os.replace(directory / name, target / name)

    def write_trial(
        self, trial_id: str, description: dict[str, Any], fence: Fence | None = None
    ) -> None:
        """Write what is known of a trial before it runs, unless it is there already."""
        path = self.trial_directory(trial_id) / "trial.json"
        if not path.exists():
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
                return str(read_record(self.trial_directory(trial_id) / name)[key])
        return None

    def write_details(
        self,
        trial_id: str,
        *,
        items: Iterable[Mapping[str, Any]] = (),
        fence: Fence | None = None,
        **details: Mapping[str, Any],
    ) -> dict[str, FileSeal]:
        """Write what lies beside a result. Equal details give equal bytes.

        Args:
            items: HellaSwag by item.
            details: objects by name: ``texts``, losses by document, and those of extensions.

        Returns:
            The seals of the files, which the result lists under ``files``.
        """
        lines = "".join(json.dumps(item, allow_nan=False) + "\n" for item in items)
        contents = {
            f"{name}.json.gz": json.dumps(value, allow_nan=False) if value else ""
            for name, value in details.items()
        }
        seals = {}
        for name, text in {"items.jsonl.gz": lines, **contents}.items():
            if text:
                data = gzip.compress(text.encode(), mtime=0)
                atomic_files.write_atomic(self.trial_directory(trial_id) / name, data, fence=fence)
                seals[name] = sealed_files.seal_bytes(data)
        return seals

    def items_text(self, trial_id: str) -> bytes:
        """Return HellaSwag by item, one JSON object a line; empty if the trial has none.

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
        return self.details(trial_id, "texts")

    def details(self, trial_id: str, name: str) -> dict[str, Any]:
        """Return one of the objects beside a result; empty if the trial has none.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        name = f"{name}.json.gz"
        path = self.trial_directory(trial_id) / name
        try:
            value = atomic_files.parse_json(self._read_detail(trial_id, name) or b"{}")
        except ValueError as error:
            raise RecordDamaged(f"{path} is damaged: {error}") from None
        if not isinstance(value, dict):
            raise RecordDamaged(f"{path} is damaged: it has no object")
        return value

    def _read_detail(self, trial_id: str, name: str) -> bytes:
        """Return the decompressed contents of a file that the result lists; empty if it does not.

        Raises:
            RecordDamaged: the file is not the one that the result lists.
        """
        path = self.trial_directory(trial_id) / name
        end = self._end(trial_id)
        if end is not None and end.status == "damaged":
            self.result(trial_id)  # says what is wrong
        files = {} if end is None else end.files
        if name not in files:
            return b""
        data = b""
        with contextlib.suppress(OSError):
            data = atomic_files.read_regular(path)
        if sealed_files.seal_bytes(data) != files[name]:
            sealed_files.check_file(path, files[name])  # says what is wrong
            raise RecordDamaged(f"{path} was replaced while it was read")
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                text = file.read(MAX_JSON_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise RecordDamaged(f"{path} is damaged: {error}") from None
        if len(text) > MAX_JSON_BYTES:
            reason = f"it unpacks to more than {MAX_JSON_BYTES:,} bytes"
            raise RecordDamaged(f"{path} is damaged: {reason}")
        return text

    def attempts(self, trial_id: str) -> list[int]:
        """Return the numbers of a trial's attempts, sorted."""
        names = list_names(self.trial_directory(trial_id) / "attempts")
        return sorted(int(name) for name in names if name.isdecimal())

    def count_pauses(self, trial_id: str) -> int:
        """Return how many attempts ended at a rung of a search, or with the training of several
        workers, which one of them then measured: nothing was lost.
        """
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
        with atomic_files.explain_write_errors(path):
            path.mkdir(parents=True)
        return attempt

    def progress(self, trial_id: str) -> dict[str, Any] | None:
        """Return the last progress that a running trial wrote, None if there is none."""
        path = self.trial_directory(trial_id) / "progress.json"
        try:
            progress = atomic_files.read_json(path)
            sealed_files.check_form(path, progress, ProgressForm)
        except (FileNotFoundError, StoreError):  # not synced, so it may be lost
            return None
        return cast(dict[str, Any], progress)
