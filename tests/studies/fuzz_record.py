"""Fuzzing of the record: damaged files through everything that reads them.

    python -m tests.studies fuzz_record --cases 10000 --first 0 --processes 1

A case damages one file of a store, or up to three of one sweep: bits flipped, bytes put in or taken
out, cut, emptied, zeroed, replaced by a file of another kind, by deep or long JSON, by a pipe, or
up to three values replaced by ones of another type or of another place. Half of the JSON records
get a new, valid seal afterwards, as somebody would write who means harm. Then commands read the
store, reports are made of it, trainings resume from it. Each must end within seconds of processor
time, with an exit code of 0, 1 or 2, without a traceback, and without a control character of the
record on the terminal. A damage that is not sealed must be found by `kvlab verify`, and no number
may differ: a trial is as it was, or damaged. Afterwards `kvlab verify --heal` must leave a record
that verifies. Where MLflow's database or artifacts are damaged, `kvlab sync` says so or repairs
them: then MLflow shows the numbers of the record, and a record that is fetched from there is the
record, or damaged. A case follows from its number alone.
"""

import contextlib
import copy
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mlflow import MlflowClient

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import read_rows
from kvlab.cli.live_server import LivePage
from kvlab.cli.main import main as kvlab
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.shards import open_dataset, verify_dataset
from kvlab.errors import KvlabError, Paused
from kvlab.fs.lease import process_identity
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.report.document import Document, Figure, Section
from kvlab.report.html_page import render_html
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document, results_csv, results_jsonl
from kvlab.report.table_export import table_to_csv, table_to_latex
from kvlab.spec import DataConfig
from kvlab.store import DETAIL_FILES, Store
from kvlab.store.timings import TIMINGS_FILE, TimedTrial, TimingSession, write_timings
from kvlab.sweep.planning.planner import describe_sweep
from kvlab.track import Tracker
from kvlab.track.fetch import fetch_record
from kvlab.track.run_description import PARENT
from kvlab.train.checkpoint import Trunk
from kvlab.train.loop import train
from tests.report.full_record import FullRecord
from tests.studies import read_options
from tests.support.record_factory import LmEvalRecord, SizedRecord, TunedRecord
from tests.support.search_record import EVERY_OUTCOME
from tests.support.stub_looks import drive_looks, load_looks
from tests.support.stub_search import searching
from tests.support.stub_trials import StubRun, drive, tiny_plan
from tests.support.tiny_training import dataset, experiment, model

SECONDS = 60
"""Processor time within which a reader has to end: other load does not change it."""

HANG_SECONDS = 900
"""Time after which a reader waits for something that does not come."""

HOSTILE = "\x1b[31m\u202e=1+1<script>alert(1)</script>"

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 10**40, 10**400, "", "x", HOSTILE, "../../x", [], {}, [[]], {"a": {}},
    [None], 0.5, "1", "9" * 5000,
)  # fmt: skip

_KINDS = (
    *("flip", "insert", "delete", "copy", "cut", "other", "text") * 3,
    "empty", "zeros", "deep", "long", "pipe", "digits",
)  # fmt: skip
"""Ways to damage a file; those that are alike at every draw come seldom."""

UNSEALED = ("progress.json", "log.txt", "traceback.txt", "stop")
"""Files of the record that nothing is computed from, so that they have no seal."""

DATABASE = "mlflow.db"
_TRACKED, _TIMED = "s", "tuned"
"""The sweeps that are mirrored into MLflow, and whose times were taken again."""

_TRAINED = experiment(training={"tokens": 64 * 8, "evaluate_every": 2, "checkpoint_every": 2})
_TRAINING_DATA = dataset(2000)
_TRAINING = "f" * 16


class Readable:
    """A store with finished, failed and unfinished trials, and what it says while it is whole.

    Args:
        folder: Where it is made; empty.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "runs"
        folder.mkdir(exist_ok=True)
        store = Store(self.path)
        _make_stub_sweeps(folder, store)
        _make_written_sweeps(self.path)
        _make_running(store)
        _make_training(store)
        self.dataset = _make_dataset(folder)
        (self.path / "tracking.id").write_text("0" * 32 + "\n")
        self.sweeps = store.sweep_names()
        self.untimed_rows = {_TIMED: self.read_rows(_TIMED)}
        _time_again(store)
        self.rows = {name: self.read_rows(name) for name in self.sweeps}
        self.first_rows = {**self.rows, **self.untimed_rows}
        assert self.rows != self.first_rows
        _make_tracked(store)
        self.shown = read_shown(f"sqlite:///{self.path}/{DATABASE}")
        self._contents = {p: p.read_bytes() for p in _list_files(folder)}
        self._stamps = {path: _stamp(path) for path in self._contents}
        self.by_trial = {trial: name for name in self.sweeps for trial in store.sweep_trials(name)}
        self.live = LivePage(store, folder / "live")

    def read_rows(self, name: str) -> dict[tuple[Any, ...], str]:
        """Return what each trial of a sweep says, as text."""
        store = Store(self.path)
        rows = read_rows(store, store.sweep(name))
        return {(row.levels, row.seed): repr(row) for row in rows}

    def list_files(self) -> list[Path]:
        """Return the files that a case may damage."""
        kept = (self.path, self.dataset)
        return [path for path in sorted(self._contents) if any(map(path.is_relative_to, kept))]

    def restore(self) -> None:
        """Undo what a case has done."""
        for path in _list_files(self.folder):
            if path not in self._contents:
                path.unlink()
        for path, content in self._contents.items():
            if _stamp(path) != self._stamps[path]:
                path.unlink(missing_ok=True)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                self._stamps[path] = _stamp(path)
        for folder in sorted((p for p in self.folder.rglob("*") if p.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()  # where it is empty
        self.live._facts.clear()
        self.live._ended.clear()

    def owner(self, path: Path) -> str:
        """Return the sweep that a file of the store belongs to."""
        if is_tracked(path):
            return _TRACKED
        kind, name = path.relative_to(self.path).parts[:2] if path.parts[-2] != "runs" else ("", "")
        if kind == "sweeps":
            return name
        trials = self.by_trial if kind == "trials" else {}
        return trials.get(name, "s")


def _list_files(folder: Path) -> list[Path]:
    return [
        Path(root, name) for root, _, names in os.walk(folder) for name in names if name[0] != "."
    ]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_mode, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _make_stub_sweeps(folder: Path, store: Store) -> None:
    """Run stub trials through real drivers: a sweep with failures, one of looks, a search."""
    planned = tiny_plan(folder, store)
    first, second = (planned.trials[index].trial.id for index in (1, 3))
    script = {(first, "measure", 0): "bug", (second, "train", 2): "diverge"}
    store.write_sweep(describe_sweep(planned, yaml="y", experiment_yaml="e", command="c"))
    drive(planned, store, StubRun(store.path, script=script))
    store.note_report("s", [0, 1])
    for name in ("looks", "search"):
        other = folder / name
        other.mkdir()
        if name == "looks":
            drive_looks(load_looks(other), Store(other / "runs"))
        else:
            searching(other)[2].run()
        _rename_sweep(other / "runs", name, store.path)
        shutil.rmtree(other)


def _rename_sweep(source: Path, name: str, target: Path) -> None:
    """Move the sweep ``s`` of one store into another store, under another name."""
    for kind in ("trials", "trainings"):
        shutil.copytree(source / kind, target / kind, dirs_exist_ok=True)
    moved = target / "sweeps" / name
    shutil.copytree(source / "sweeps" / "s", moved)
    description = Store(source).sweep("s")
    write_sealed_json(moved / "sweep.json", {**description, "name": name})


def _make_written_sweeps(path: Path) -> None:
    small = {"factors": {"heads": ("mha", "mqa")}, "seeds": (0, 1), "items": 4, "points": 3}
    FullRecord(name="full", seeds=(0, 2, 3)).write(path)
    TunedRecord(name="tuned", seeds=(0, 1), points=3).write(path)
    SizedRecord(name="sized", seeds=(0, 1), points=3, predict=(10**8,)).write(path)
    LmEvalRecord(name="tasks", **small).write(path)
    EVERY_OUTCOME.name = "found"
    EVERY_OUTCOME.write(path)


def _time_again(store: Store) -> None:
    """Take the times of one seed again."""
    trials = {
        trial: TimedTrial(
            store.result_seal(trial), {"tpot_ms_p50": 77.5}, ({"metric": "tpot", "value": 0.0775},)
        )
        for trial in store.sweep_trials(_TIMED)
        if store.status(trial) == "done"
    }
    moment = "2026-01-01T00:00:00Z"
    session = TimingSession(0, moment, moment, "cpu", 1, None, trials)
    write_timings(store.sweep_directory(_TIMED), [session])


def _make_tracked(store: Store) -> None:
    """Mirror a sweep into MLflow, and close what the file is open for."""
    uri = f"sqlite:///{store.path}/new.db"
    Tracker(store.path, uri).mirror(_TRACKED)
    (store.path / "new.db").rename(store.path / DATABASE)
    (store.path / "mlflow.lock").unlink(missing_ok=True)


def read_shown(uri: str) -> dict[str, Any]:
    """Return what MLflow shows of each run: by key, its params and its metrics."""
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(_TRACKED)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    return {run.data.tags.get("kvlab.key"): (run.data.params, run.data.metrics) for run in runs}


def is_tracked(path: Path) -> bool:
    """Return whether a file is MLflow's."""
    return path.name == DATABASE or "mlartifacts" in path.parts


def _make_running(store: Store) -> None:
    """Let one trial look as if it ran on another machine."""
    directory = store.trial_directory(store.sweep_trials("full")[0])
    (directory / "result.json").unlink()
    state = {"stage": "training", "step": 1, "steps": 20, "loss": 1.0, "seconds_left": 3.0}
    state |= {"curves": {"train_loss": [[1, 16, 1.0]], "validation_loss": [[1, 16, 1.0]]}}
    (directory / "progress.json").write_text(json.dumps(state))
    holder = {"token": "t", "seconds": 60.0, "since": "now", **process_identity(), "boot": "other"}
    (directory / "lock.1").write_text(f"held {0:012d} {json.dumps(holder)}\n")


def _make_training(store: Store) -> None:
    """Leave a real training that was stopped: checkpoints, a rung, and a trunk."""
    torch.manual_seed(0)
    with contextlib.suppress(Paused):
        train(
            model(_TRAINED), _TRAINING_DATA, _TRAINED, seed=0, until=4,
            directory=store.training_directory(_TRAINING),
        )  # fmt: skip
    newest = max((store.training_directory(_TRAINING) / "checkpoints").glob("step-*"))
    shutil.copytree(newest, store.trunk_directory("e" * 16) / newest.name)


def _make_dataset(folder: Path) -> Path:
    chance = random.Random(0)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(20):
        text = " ".join(chance.choices("abcdefg", k=200))
        (texts / f"{number}.txt").write_text(text)
    os.environ["KVLAB_DATA"] = str(folder / "data")
    data = DataConfig(
        source="files", tokenizer="bytes", paths=(str(texts),), validation_fraction=0.2
    )
    return prepare_dataset(data, workers=1).folder


def damage_file(path: Path, chance: random.Random, others: list[Path]) -> str:
    """Damage a file and return how."""
    data = path.read_bytes()
    kind = chance.choice([*_KINDS, *["value"] * 25 * path.name.endswith(".json")])
    if kind == "value":
        return _change_values(path, chance)
    if kind == "other":
        other = chance.choice(others)
        path.write_bytes(other.read_bytes())  # which may be the same file
        return f"{kind} {other.name}"
    if kind == "pipe":
        path.unlink()
        os.mkfifo(path)
        return kind
    start, how = chance.randrange(len(data) + 1), kind
    length = min(chance.choice((1, 2, 8, 100, 4096)), len(data) - start)
    if kind == "flip" and data:
        places = {chance.randrange(8 * len(data)) for _ in range(chance.choice((1, 1, 2, 20)))}
        changed = bytearray(data)
        for place in places:
            changed[place // 8] ^= 1 << place % 8
        data, how = bytes(changed), f"{kind} {sorted(places)[:3]}"
    elif kind == "insert":
        text = chance.choice((b"\0", b'"', b"{", b"[", b",", b"1", b"-", b"e9", b"\xff", b"\n"))
        text *= chance.choice((1, 1, 3, 1000))
        data, how = data[:start] + text + data[start:], f"{kind} {text[:5]!r} at {start}"
    elif kind == "delete":
        data, how = data[:start] + data[start + length :], f"{kind} {length} at {start}"
    elif kind == "copy":  # such as a block that went to another place
        to = chance.randrange(len(data) + 1)
        data = data[:to] + data[start : start + length] + data[to + length :]
        how = f"{kind} {length} from {start} to {to}"
    elif kind == "cut":
        data, how = data[:start], f"{kind} at {start}"
    elif kind == "text":
        size = chance.choice((1, 20, 200, 2000))
        data = bytes(chance.randrange(256) for _ in range(size))
        how = f"{kind} of {size} {data[:4]!r}"
    else:
        data = {
            "zeros": bytes(len(data)),
            "deep": chance.choice((b"[", b'{"a":', b'[{"a":')) * 200_000,
            "long": b'{"a": "' + b"x" * 5_000_000 + b'"}',
            "digits": b'{"schema": ' + b"9" * 1_000_000 + b"}",
        }.get(kind, b"")
    path.write_bytes(data)
    return how


def _change_values(path: Path, chance: random.Random) -> str:
    """Replace up to three values of a JSON file; seal it anew in half of the cases."""
    content = json.loads(path.read_bytes())
    seal = content.pop("sha256", None)
    how = [_change_value(content, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    if seal is not None and content and chance.random() < 0.5:
        write_sealed_json(path, json.loads(json.dumps(content), parse_constant=str))
        return f"sealed {', '.join(how)}"
    path.write_text(json.dumps(content if seal is None else {**content, "sha256": seal}))
    return ", ".join(how)


def _change_value(content: Any, chance: random.Random) -> str:
    """Replace one value by one of another type, of another place, or one that is a bit off."""
    places = list(_find_places(content))
    if not places:
        return "nothing"
    # each part as often, however many numbers a curve has
    parts = sorted({place[0] for place in places}, key=str)
    part = chance.choice(parts)
    keys, container, key = chance.choice([place for place in places if place[0] == part])
    way = chance.choice(("table", "table", "near", "place", "drop", "name"))
    value = chance.choice((*_VALUES, float("nan"), float("inf")))
    old = container[key]
    if way == "near" and isinstance(old, int | float) and abs(old) < 1e300:
        value = old + chance.choice((1, -1, 0.5, 1e-9, old, -2 * old, chance.randrange(10**6)))
    elif way == "near" and isinstance(old, str):
        place = chance.randrange(len(old) + 1)
        value = old[:place] + chance.choice("0aZ/\n\x1b\u202e\ud800é") + old[place + 1 :]
    elif way == "place":
        _, other, other_key = chance.choice(places)
        value = copy.deepcopy(other[other_key])
    elif way == "name" and isinstance(container, dict):
        container[chance.choice((HOSTILE, "", "x", "0", str(key).upper()))] = container.pop(key)
        return f"{'.'.join(map(str, keys))} has another name"
    if way == "drop":
        del container[key]
    else:
        container[key] = value
    return f"{'.'.join(map(str, keys))} = {'gone' if way == 'drop' else str(value)[:40]!a}"


def _find_places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the path of a value without the indices of lists, its container and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        path = (*above, key) if isinstance(value, dict) else (*above, "[]")
        yield path, value, key
        if isinstance(item, dict | list):
            yield from _find_places(item, path)


class TooSlow(BaseException):
    """A reader has not ended; nothing catches it."""


@contextlib.contextmanager
def limit_time() -> Iterator[None]:
    """Raise TooSlow after `SECONDS` of this process, or `HANG_SECONDS` by the clock."""

    def give_up(number: int, _: object) -> None:
        limit = f"{SECONDS} s of processor" if number == signal.SIGPROF else f"{HANG_SECONDS} s"
        raise TooSlow(f"not done after {limit}")

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, give_up)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_reader(read: Callable[[], Any], *, is_log: bool = False) -> str | None:
    """Call a reader; return what is wrong with how it ended, None if nothing."""

    out = io.StringIO()
    try:
        with limit_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = read()
    except KvlabError as error:
        code = f"{error}"
    except BaseException:
        return traceback.format_exc()
    text = out.getvalue() + (code if isinstance(code, str) else "")
    is_wrong = not isinstance(code, str | None) and code not in (0, 1, 2)
    hidden = {character for character in "\x1b\u202e\x07\x9b" if character in text}
    if is_wrong or ("Traceback" in text and not is_log) or hidden:
        return f"exit code {code}, hidden characters {hidden}: {text[-1500:]!a}"
    return None


def make_report(store: Path, name: str, *, has_figures: bool = False) -> None:
    """Make everything of a report, the figures only if asked for: they take seconds."""
    study = Study.load(Store(store), name)
    document = make_document(study)
    if not has_figures:
        document = Document(document.title, drop_figures(document.sections))
    texts = [render_markdown(document), results_jsonl(study)]
    page = render_html(document)
    tables = [results_csv(study), *(table_to_csv(table) for table in document.tables)]
    latex = [table_to_latex(table) for table in document.tables]
    assert "<script>alert" not in page
    assert "\x1b" not in "".join((*texts, page, *tables, *latex))
    cells = [cell for table in tables for line in table.splitlines() for cell in line.split(",")]
    assert not [cell for cell in cells if cell.lstrip('"')[:2] in ("=1", "\x1b[")]


def drop_figures(sections: Mapping[str, Section]) -> dict[str, Section]:
    return {
        name: replace(
            section, contents=tuple(c for c in section.contents if not isinstance(c, Figure))
        )
        for name, section in sections.items()
    }


def resume_training(path: Path) -> None:
    """Go on with the training that was stopped."""
    torch.manual_seed(0)
    train(
        model(_TRAINED), _TRAINING_DATA, _TRAINED, seed=0, until=None,
        directory=Store(path).training_directory(_TRAINING),
        trunk=Trunk(Store(path).trunk_directory("e" * 16)),
    )  # fmt: skip


def read_dataset(folder: Path) -> None:
    """Read all tokens of a dataset in the way of a training, and verify it."""
    verify_dataset(folder)
    opened = open_dataset(folder)
    for split in (opened.train, opened.validation):
        assert len(split[:]) == len(split)


def use_mlflow(record: Readable, number: int, is_forged: bool) -> None:
    """Sync a sweep with a damaged database or damaged artifacts, then fetch the record from there.

    Args:
        number: Of the database's name: MLflow keeps files open by their names.
        is_forged: Whether artifacts were sealed anew with other values.
    """
    database = (record.path / DATABASE).rename(record.path / f"{number}.db")
    uri = f"sqlite:///{database}"
    Tracker(record.path, uri).mirror(_TRACKED)
    shown = read_shown(uri)
    _, summary = shown[PARENT]
    for name in summary.keys() - record.shown[PARENT][1].keys():
        del summary[name]  # MLflow cannot delete a metric, and other versions may have had it
    assert shown == record.shown, "MLflow shows other numbers than the record"
    with tempfile.TemporaryDirectory() as folder:
        store = fetch_record(uri, _TRACKED, Path(folder))
        fetched = {(row.levels, row.seed): row for row in read_rows(store, store.sweep(_TRACKED))}
    for key, row in () if is_forged else fetched.items():
        if row.status not in ("damaged", "missing") and key in record.rows[_TRACKED]:
            assert repr(row.record) in record.rows[_TRACKED][key], f"{key} is {row!r:.500}"


def list_readers(record: Readable, path: Path, chance: random.Random, is_forged: bool) -> list[Any]:
    """Return the name and the function of everything that reads a file."""
    store = ["--store", str(record.path)]

    def command(*words: str) -> tuple[str, Callable[[], Any]]:
        return "kvlab " + " ".join(words), partial(kvlab, [*words, *store])

    if path.is_relative_to(record.dataset):
        return [("dataset", partial(read_dataset, record.dataset))]
    if is_tracked(path):
        return [("MLflow", partial(use_mlflow, record, chance.randrange(10**9), is_forged))]
    name, readers, has_figures = record.owner(path), [], chance.random() < 0.003
    trial = next(one for one in path.parts[::-1] if len(one) == 16 or one == "runs")
    known = trial if trial in record.by_trial else next(iter(record.by_trial))
    if "trainings" in path.parts and _TRAINING in path.parts:
        readers = [("resume", partial(resume_training, record.path))]
    readers += [command("status", name), command("logs", known), command("logs", name)]
    if chance.random() < 0.3:
        readers += [command("gc", "--weights", "--unused", "--pruned"), command("status")]
    if "trials" in path.parts or "sweeps" in path.parts:
        readers += [
            ("report", partial(make_report, record.path, name, has_figures=has_figures)),
            ("live page", lambda: record.live.describe_sweep(name) and None),
        ]
        readers += [command("compare", name, "s")] * (chance.random() < 0.3)
    if name == "s" and not path.name.startswith("lock."):  # whose holder is waited for
        readers.append(("submit", partial(_submit, record)))
    copied = str(record.folder / "copied")
    if chance.random() < 0.05:
        readers += [command("copy", name, "--to", copied), command("copy", name, "--from", copied)]
    return readers


def _submit(record: Readable) -> None:
    store = Store(record.path)
    drive(tiny_plan(record.folder, store), store, StubRun(store.path))


def check_case(number: int, record: Readable) -> str | None:
    """Run one case; return what is wrong, None if nothing."""
    chance = random.Random(number)
    files = record.list_files()
    damages: dict[Path, str] = {}
    checked, is_forged = [], False
    for path in _choose_files(record, files, chance):
        before = path.read_bytes()
        damages[path] = damage_file(path, chance, [one for one in files if one.is_file()])
        is_forged |= damages[path].startswith("sealed")
        if not path.is_file() or path.read_bytes() != before:
            checked += [path] * is_verified(record, path)
    texts = (f"{how} in {path.relative_to(record.folder)}" for path, how in damages.items())
    where = f"case {number}: {'; '.join(texts)}"
    readers = [] if is_forged else [("numbers", partial(_check_numbers, record, checked))]
    path = next(iter(damages))
    readers += [
        *list_readers(record, path, chance, is_forged),
        ("heal", partial(_verify, record, path, "--heal")),
        *[("verify", partial(_verify, record, path))] * (chance.random() < 0.2),
    ]
    try:
        for name, reader in readers:
            problem = run_reader(reader, is_log=name.startswith("kvlab logs"))
            if problem is not None:
                return f"{where}, {name}: {problem}"
    finally:
        with limit_time():
            record.restore()
    return None


def _choose_files(record: Readable, files: list[Path], chance: random.Random) -> list[Path]:
    """Return one file, each kind as often, however many there are; or some of its sweep."""
    kind = chance.choice(sorted(set(map(_kind_of, files))))
    first = chance.choice([one for one in files if _kind_of(one) == kind])
    if chance.random() < 0.6 or not first.is_relative_to(record.path):
        return [first]
    near = [one for one in files if one.is_relative_to(record.path)]
    near = [one for one in near if record.owner(one) == record.owner(first) and one != first]
    near = [one for one in near if is_tracked(one) == is_tracked(first)]
    return [first, *chance.sample(near, min(len(near), chance.choice((1, 1, 2))))]


def is_verified(record: Readable, path: Path) -> bool:
    """Return whether `kvlab verify` tells of every damage of a file."""
    if not path.is_relative_to(record.path) or is_tracked(path) or path.name in UNSEALED:
        return False
    if path.name in DETAIL_FILES:  # which a result lists, if there is one
        return (path.parent / "result.json").exists()
    return ".json" in path.name or ".safetensors" in path.name


def _kind_of(path: Path) -> str:
    """Return the name of a file without the ids and numbers in it."""
    name = re.sub(r"\d+", "", f"{path.name.split('.')[0]}{path.suffix}")
    return f"MLflow's {name}" if is_tracked(path) else name


def _verify(record: Readable, path: Path, *words: str) -> int:
    """Verify the sweep that a file belongs to; the whole store, if it may belong to several."""
    is_of_one = path.is_relative_to(record.path) and {"trials", "sweeps"} & set(path.parts)
    sweep = [record.owner(path)] if is_of_one else []
    return kvlab(["verify", *sweep, *words, "--store", str(record.path)])


def _check_numbers(record: Readable, damaged: list[Path]) -> None:
    """Check that verification tells of damaged files, and that no trial says something else.

    Times that were taken again may be the first ones again, if their file is damaged.
    """
    for path in damaged[:1]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = _verify(record, path)
        if code == 0 and path.exists():
            raise AssertionError("kvlab verify finds nothing")
    owners = {record.owner(path) for path in damaged}
    sweeps = (path for path in damaged if "sweeps" in path.parts and path.name != TIMINGS_FILE)
    for name in owners - {record.owner(path) for path in sweeps}:
        for key, row in record.read_rows(name).items():
            known = (record.rows[name][key], record.first_rows[name][key])
            if row not in known and "status='damaged'" not in row:
                raise AssertionError(f"{key} of {name} says {row[:500]}")


def run_cases(first: int, count: int) -> list[str]:
    """Run cases in this process; print and return what is wrong."""
    problems = []
    with tempfile.TemporaryDirectory() as name:
        record = Readable(Path(name) / "record")
        for number in range(first, first + count):
            problem = check_case(number, record)
            if problem is not None:
                problems.append(problem)
                print(problem, flush=True)
    return problems


def main() -> int:
    options = read_options(__doc__, cases=10_000, first=0, processes=1)
    share = -(-options.cases // options.processes)
    parts = [
        (start, min(share, options.cases - start + options.first))
        for start in range(options.first, options.first + options.cases, share)
    ]
    if len(parts) == 1:
        failed = len(run_cases(*parts[0]))
    else:
        with multiprocessing.get_context("spawn").Pool(len(parts)) as pool:
            failed = sum(map(len, pool.starmap(run_cases, parts)))
    print(f"{options.cases} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
