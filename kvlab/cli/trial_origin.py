"""What a trial rests on: its files, text, code, machine, command and time; see `kvlab explain`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.terminal import format_table
from kvlab.data import list_prepared_datasets, open_dataset
from kvlab.data.shards import read_manifest
from kvlab.errors import DataError, StoreError
from kvlab.humanize import format_count
from kvlab.store import Store
from kvlab.store.verification import TrialFile, list_trial_files

NOT_RECORDED = "not recorded"

MAX_LISTED = 40
"""Trials that are listed, damaged ones before others."""

MAX_NOTES = 3
"""Notes that are listed, such as one for each training whose weights were removed."""


@dataclass(frozen=True)
class TrialOrigin:
    """One trial and what it rests on.

    Attributes:
        status: How it ended; ``not ended`` without a result.
        facts: What ran, in words, by topic.
        started, finished: In UTC; empty if they are not recorded.
        files: Of the trial and of its training.
        notes: What is not as it was and is no damage.
    """

    trial: str
    training: str
    status: str
    facts: Mapping[str, str]
    started: str
    finished: str
    files: Sequence[TrialFile]
    notes: Sequence[str]

    @property
    def is_damaged(self) -> bool:
        return any(file.problem for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "trial": self.trial,
            "training": self.training,
            "status": self.status,
            **self.facts,
            "started": self.started,
            "finished": self.finished,
            "files": [
                {"path": one.path, "sha256": one.sha256, "problem": one.problem}
                for one in self.files
            ],
            "notes": list(self.notes),
        }


class TrialOrigins:
    """Read what trials rest on, each trial and each text once."""

    def __init__(self, store: Store):
        self._store = store
        self._trials: dict[str, TrialOrigin] = {}
        self._texts: dict[str, str] = {}

    @property
    def seen(self) -> list[TrialOrigin]:
        return list(self._trials.values())

    def read_all(self, trials: Iterable[str]) -> list[TrialOrigin]:
        return [self.read(trial) for trial in dict.fromkeys(trials)]

    def read(self, trial: str) -> TrialOrigin:
        """Check the files of a trial, and read what its result says of its making."""
        if trial not in self._trials:
            self._trials[trial] = self._read(trial)
        return self._trials[trial]

    def _read(self, trial: str) -> TrialOrigin:
        files, notes = list_trial_files(self._store, trial)
        try:
            result = self._store.result(trial) or {}
        except StoreError:
            result = {}
        made = result.get("provenance") or {}
        return TrialOrigin(
            trial,
            str(result.get("training") or ""),
            self._store.status(trial) or "not ended",
            self._describe(made, result) if made else {},
            str(made.get("started") or ""),
            str(made.get("finished") or ""),
            files,
            notes,
        )

    def _describe(self, made: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
        versions = {"kvlab": made.get("kvlab"), "Python": made.get("python")}
        versions |= made.get("versions") or {}
        listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        start = (result.get("training_record") or {}).get("start")
        return {
            **({"start": f"weights of {start['source']}, {start['identity']}"} if start else {}),
            "command": str(made.get("command") or NOT_RECORDED),
            "code": _describe_commit(made),
            "versions": listed or NOT_RECORDED,
            "machine": _describe_machine(made),
            "text": self._describe_text(made.get("data") or {}, result),
        }

    def _describe_text(self, data: Mapping[str, Any], result: Mapping[str, Any]) -> str:
        if not data:
            return NOT_RECORDED
        source = ((result.get("experiment") or {}).get("data") or {}).get("source", "")
        digest = str(data.get("digest") or "")
        if digest not in self._texts:
            self._texts[digest] = _find_text(digest)
        name = f"{source} in tokens of {data.get('tokenizer', '?')}".strip()
        return f"{name}, digest {digest or NOT_RECORDED}; {self._texts[digest]}"


def _describe_commit(made: Mapping[str, Any]) -> str:
    if not made.get("commit"):
        return f"commit {NOT_RECORDED}: kvlab ran outside of a checkout"
    dirty = {True: "with uncommitted changes", False: "no uncommitted changes"}
    state = dirty.get(made.get("dirty"), f"uncommitted changes {NOT_RECORDED}")  # type: ignore[arg-type]
    return f"commit {made['commit']}, {state}"


def _describe_machine(made: Mapping[str, Any]) -> str:
    threads = made.get("threads")
    parts = [
        str(made.get("device") or f"device {NOT_RECORDED}"),
        f"threads {NOT_RECORDED}" if threads is None else format_count(int(threads), "thread"),
        str(made.get("platform") or f"platform {NOT_RECORDED}"),
    ]
    parts += ["no CPU kernels (KVLAB_PLAIN)"] if made.get("kernels") is False else []
    timings = made.get("timings")
    return ", ".join(parts) + (f"; timings {timings}" if timings else "")


def _find_text(digest: str) -> str:
    """Say where on this machine the tokens of a digest are, and whether their manifest verifies."""
    for folder in list_prepared_datasets():
        try:
            if read_manifest(folder)["digest"] != digest:
                continue
            open_dataset(folder)
        except DataError as error:
            return f"DAMAGED on this machine: {error}"
        return f"{folder}/manifest.json verifies"
    return "not on this machine"


def format_facts(
    trials: Sequence[TrialOrigin], names: Mapping[str, str], *, with_files: bool
) -> Iterator[str]:
    """Yield what trials rest on: a table of them, their common facts, and their files.

    Args:
        names: Cell and seed by trial.
        with_files: List whole files, too; damaged ones are always listed.
    """
    if len(trials) > 1 or names:
        yield _format_trials(trials, names)
        yield ""
    yield from _format_common(trials)
    notes = list(dict.fromkeys(note for one in trials for note in one.notes))
    yield from (f"note      {note}" for note in notes[:MAX_NOTES])
    if len(notes) > MAX_NOTES:
        yield f"note      and {len(notes) - MAX_NOTES:,} more; --json has all"
    listed = {file.path: file for one in trials for file in one.files}
    for file in listed.values():
        if file.problem:
            yield f"DAMAGED   {file.path}: {file.problem}"
    if with_files:
        yield "files     verified now; of .json files the seal at their end"
        yield from (f"  {f.sha256}  {f.path}" for f in listed.values() if not f.problem)
    else:
        hint = f"`kvlab explain {trials[0].trial[:ID_DIGITS]}` lists those of a trial"
        whole = sum(not file.problem for file in listed.values())
        yield f"files     {whole} of {len(listed)} verify; {hint} with their sha256, --files all"


def _format_trials(trials: Sequence[TrialOrigin], names: Mapping[str, str]) -> str:
    rows = [["trial", "cell", "status", "files", "started (UTC)", "finished"]]
    damaged = [one for one in trials if one.is_damaged]
    listed = list(dict.fromkeys(one.trial for one in (*damaged, *trials)))[:MAX_LISTED]
    for one in (one for one in trials if one.trial in listed):
        bad = sum(bool(file.problem) for file in one.files)
        files = f"{bad} DAMAGED" if bad else f"{len(one.files)} verify"
        ended = [_format_time(one.started), _format_time(one.finished)]
        rows.append([one.trial[:ID_DIGITS], names.get(one.trial, ""), one.status, files, *ended])
    more = len(trials) - len(listed)
    return format_table(rows) + (f"\nand {more:,} trials more; --json has all" if more else "")


def _format_time(text: str) -> str:
    return text.replace("T", " ").removesuffix("Z") or NOT_RECORDED


def _format_common(trials: Sequence[TrialOrigin]) -> Iterator[str]:
    """Yield each fact once with the trials that it holds for, if they differ."""
    unread = [one.trial[:ID_DIGITS] for one in trials if not one.facts]
    if unread:
        yield f"origin    {NOT_RECORDED}, as there is no whole result: {', '.join(unread)}"
    trials = [one for one in trials if one.facts]
    if len(trials) == 1:
        one = trials[0]
        yield f"when      {_format_time(one.started)} to {_format_time(one.finished)} UTC"
        yield f"training  {one.training or NOT_RECORDED}"
    for topic in ("start", "command", "code", "versions", "machine", "text"):
        values: dict[str, list[str]] = {}
        if topic == "start" and not any(topic in trial.facts for trial in trials):
            continue  # all began with freshly drawn weights
        for trial in trials:
            values.setdefault(trial.facts.get(topic, NOT_RECORDED), []).append(trial.trial)
        for value, of in values.items():
            ids = ", ".join(trial[:ID_DIGITS] for trial in of[:4])
            more = f" and {len(of) - 4} more" if len(of) > 4 else ""
            yield f"{topic:<9} {value}" + (f"  ({ids}{more})" if len(values) > 1 else "")
