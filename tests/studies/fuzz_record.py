"""Damage files of the record, then read, heal and submit it: nothing is lost or silently changed.

    python -m tests.studies fuzz_record --cases 1000 --first 0

Five stores: a sweep with failures, one with looks, a search that prunes, real trainings on a shared
stable phase of which one was interrupted, and five sweeps as reports show them. A case damages a
file, or up to three of one sweep. Half of the JSON records whose values change get a new, valid
seal, as somebody would write who means harm.

Then every reader must end within seconds, with an exit code of 0, 1 or 2, without a traceback or a
control character. A damage that is not sealed must be found by `kvlab verify`, and each trial must
be as it was, damaged or missing. After `kvlab verify --heal` and a submit the record must verify
and, unless other values were sealed, have the numbers of before. A case follows from its number.
"""

import contextlib
import copy
import faulthandler
import io
import json
import os
import random
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow, read_rows
from kvlab.cli.commands import COMMANDS
from kvlab.cli.main import main as kvlab
from kvlab.errors import KvlabError
from kvlab.fs import lock
from kvlab.fs.lease import process_identity
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.own_extensions import load_parts
from kvlab.report.html_page import render_html
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document, results_csv, results_jsonl
from kvlab.report.table_export import table_to_csv, table_to_latex
from kvlab.spec import load_sweep
from kvlab.store import DETAIL_FILES, Store
from kvlab.store.verification import heal
from kvlab.sweep import plan
from kvlab.sweep.planning.planner import describe_sweep
from kvlab.trial.run import run_task
from tests.report.full_record import FullRecord
from tests.studies import read_options
from tests.support.chaos_checks import is_reproducible
from tests.support.record_factory import SizedRecord, TunedRecord
from tests.support.search_record import EVERY_OUTCOME
from tests.support.stub_looks import drive_looks, load_looks
from tests.support.stub_search import PRUNED, RisingRun, searching
from tests.support.stub_trials import StubRun, drive, tiny_plan
from tests.support.tiny_sweep import BUDGETS, TRUNK_EXPERIMENT, write_tiny_sweep

SECONDS = 300
"""Time within which a reader has to end; else the study ends, and says where it was."""

HOSTILE = "\x1b[31m\u202e=1+1<script>alert(1)</script>"

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 10**40, 10**400, "", "x", HOSTILE, "../../x", [], {}, [[]], {"a": {}},
    [None], 0.5, "1", "9" * 5000, float("nan"), float("inf"),
)  # fmt: skip

_KINDS = (
    *("flip", "insert", "delete", "cut", "other", "gone") * 3,
    *("empty", "deep", "pipe", "loop", "endless"),
)
"""Ways to damage a file; those that are alike at every draw come seldom."""

UNSEALED = ("progress.json", "log.txt", "traceback.txt", "repairs.txt", "paused", "stop")
"""Files of the record that nothing is computed from, so that they have no seal."""

OF_STUBS = ("checkpoint", "steps.log")


# The stores


class Kept:
    """A store, and what it says while it is whole: by sweep the rows of its trials, as texts, and
    what `read_end` returns after ``submit`` has run its sweep ``s``, if anything can run there."""

    def __init__(self, folder: Path, submit: Callable[[], Any] | None = None):
        self.folder, self.path, self.submit = folder, folder / "runs", submit
        self.end: dict[Any, Any] = {}
        self.rows: dict[str, dict[Any, str]] = {}
        folder.mkdir()
        if submit is not None:
            submit()

    def keep(self) -> None:
        """Note what the store says, and copy it."""
        store = Store(self.path)
        for name in store.sweep_names():
            self.rows[name] = {key: repr(row) for key, row in self.read_rows(name).items()}
        if self.submit is not None:
            self.end = self.end or self.read_end()
        self.by_trial = {trial: name for name in self.rows for trial in store.sweep_trials(name)}
        self.files = [
            path
            for path in sorted(self.folder.rglob("*"))
            if {"runs", "datasets"} & set(path.parts) and path.name not in OF_STUBS
            if path.is_file() and not any(part[0] == "." for part in path.parts)
        ]
        shutil.copytree(self.folder, self.folder.with_suffix(".whole"))

    def restore(self) -> None:
        """Bring back what a case has touched."""
        os.chdir("/")
        shutil.rmtree(self.folder)
        shutil.copytree(self.folder.with_suffix(".whole"), self.folder)
        os.chdir(self.folder)

    def read_rows(self, name: str) -> dict[tuple[Any, ...], TrialRow]:
        store = Store(self.path)
        return {(row.levels, row.seed): row for row in read_rows(store, store.sweep(name))}

    def read_end(self) -> dict[tuple[Any, ...], Any]:
        """Return what was measured in the end, without what a clock or a process says."""
        return {
            key: (row.status, {k: v for k, v in row.measurements.items() if is_reproducible(k)})
            for key, row in self.read_rows("s").items()
        }

    def owner(self, path: Path) -> str:
        """Return the sweep that a file belongs to."""
        kind, name = path.relative_to(self.folder).parts[1:3]
        return name if kind == "sweeps" else self.by_trial.get(name, next(iter(self.rows)))


def make_plain(folder: Path) -> Kept:
    """Stub trials, of which two failed."""
    store = Store(folder / "runs")

    def submit() -> None:
        planned = tiny_plan(folder, store)
        first, second = (planned.trials[index].trial.id for index in (1, 3))
        script = {(first, "measure", 0): "bug", (second, "train", 2): "diverge"}
        described = describe_sweep(planned, yaml="y", experiment_yaml="e", command="c")
        drive(planned, store, StubRun(store.path, script=script), description=described)

    kept = Kept(folder, submit)
    store.note_report("s", [0, 1])
    return kept


def make_looks(folder: Path) -> Kept:
    return Kept(folder, lambda: drive_looks(load_looks(folder), Store(folder / "runs")))


def make_search(folder: Path) -> Kept:
    def submit() -> None:
        _, search, driver = searching(folder, PRUNED, run=RisingRun)
        driver.run()
        search.finish()

    return Kept(folder, submit)


def make_trunks(folder: Path) -> Kept:
    """Real trainings that share a stable phase; the last was interrupted at a checkpoint."""
    store = Store(folder / "runs")

    def submit() -> None:
        os.chdir(folder)
        if not (folder / "s.yaml").exists():
            write_tiny_sweep(folder, BUDGETS, TRUNK_EXPERIMENT)
        planned = plan(load_sweep(folder / "s.yaml"), store)
        described = describe_sweep(planned, yaml="y", experiment_yaml="e", command="c")
        drive(planned, store, lambda task: run_task(task, store.path), description=described)

    os.environ["KVLAB_DATA"] = str(folder / "data")
    kept = Kept(folder, submit)
    kept.end = kept.read_end()
    last = plan(load_sweep(folder / "s.yaml"), store).trials[-1].trial
    training = store.training_directory(last.training_id)
    for path in (store.trial_directory(last.id) / "result.json", training / "training.json"):
        path.unlink()
    shutil.rmtree(training / "final")
    return kept


def make_written(folder: Path) -> Kept:
    """Sweeps with all that reports show, written without a trial; one trial seems to run."""
    kept = Kept(folder)
    small = {"factors": {"heads": ("mha", "mqa")}, "seeds": (0, 1), "items": 4, "points": 3}
    FullRecord(name="full", seeds=(0, 2, 3)).write(kept.path)
    TunedRecord(name="tuned", seeds=(0, 1), points=3).write(kept.path)
    SizedRecord(name="sized", seeds=(0, 1), points=3, predict=(10**8,)).write(kept.path)
    for name, parts in load_parts().items():
        if parts.details:  # has files of its own
            made = import_module(f"tests.extensions.{name}.records").RECORD
            replace(made, name=name, **small).write(kept.path)
    EVERY_OUTCOME.name = "found"
    EVERY_OUTCOME.write(kept.path)
    store = Store(kept.path)
    directory = store.trial_directory(store.sweep_trials("full")[0])
    (directory / "result.json").unlink()
    state = {"stage": "training", "step": 1, "steps": 20, "loss": 1.0, "seconds_left": 3.0}
    state |= {"curves": {"train_loss": [[1, 16, 1.0]], "validation_loss": [[1, 16, 1.0]]}}
    (directory / "progress.json").write_text(json.dumps(state))
    holder = {"token": "t", "seconds": 60.0, "since": "now", **process_identity(), "boot": "other"}
    (directory / "lock.1").write_text(f"held {0:012d} {json.dumps(holder)}\n")
    return kept


MAKERS = (make_plain, make_looks, make_search, make_trunks, make_written)


# Damage


def damage_file(path: Path, chance: random.Random, others: list[Path]) -> str:
    """Damage a file and return how."""
    data = path.read_bytes()
    how = kind = chance.choice([*_KINDS, *["value"] * 25 * path.name.endswith(".json")])
    if kind == "value":
        return _change_values(path, chance)
    if kind in ("gone", "pipe", "loop", "endless"):
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind != "gone":
            path.symlink_to(path.name if kind == "loop" else "/dev/zero")
        return kind
    start = chance.randrange(len(data) + 1)
    length = min(chance.choice((1, 2, 8, 100, 4096)), len(data) - start)
    if kind == "flip" and data:
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 20))):
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        data = bytes(changed)
    elif kind == "insert":
        text = chance.choice((b"\0", b'"', b"{", b"[", b",", b"1", b"-", b"e9", b"\xff", b"\n"))
        data = data[:start] + text * chance.choice((1, 1, 3, 1000)) + data[start:]
    elif kind == "delete":
        data = data[:start] + data[start + length :]
    elif kind == "cut":
        data = data[:start]
    elif kind == "other":
        other = chance.choice(others)
        data, how = other.read_bytes(), f"other {other.name}"
    else:
        data = chance.choice((b"[", b'{"a":')) * 200_000 if kind == "deep" else b""
    path.write_bytes(data)
    return f"{how} at {start}"


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
    part = chance.choice(sorted({place[0] for place in places}, key=str))
    keys, container, key = chance.choice([place for place in places if place[0] == part])
    way = chance.choice(("table", "table", "near", "place", "drop", "name"))
    value, old = chance.choice(_VALUES), container[key]
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


# Readers

Reader = tuple[str, Callable[[], Any]]


def run_reader(read: Callable[[], Any], *, is_log: bool = False) -> tuple[str | None, bool]:
    """Call a reader; return what is wrong with how it ended, and whether it refused to read."""
    out = io.StringIO()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = read()
    except KvlabError as error:
        code = f"{error}"
    except BaseException as error:
        return "".join(traceback.format_exception(error)[-3:]), False
    finally:
        faulthandler.cancel_dump_traceback_later()
    text = out.getvalue() + (code if isinstance(code, str) else "")
    is_wrong = isinstance(code, int) and code not in (0, 1, 2)
    hidden = {character for character in "\x1b\u202e\x07\x9b" if character in text}
    if is_wrong or ("Traceback" in text and not is_log) or hidden:
        return f"exit code {code}, hidden characters {hidden}: {text[-1500:]!a}", False
    return None, code in (1, 2) or isinstance(code, str)


def make_report(path: Path, name: str) -> None:
    """Make everything of a report but its figures, which take seconds."""
    study = Study.load(Store(path), name)
    document = make_document(study)
    with mock.patch("kvlab.report.figures.render_inline_svg", return_value=""):
        page = render_html(document)
    tables = [results_csv(study), *(table_to_csv(table) for table in document.tables)]
    latex = [table_to_latex(table) for table in document.tables]
    texts = (render_markdown(document), results_jsonl(study), page, *tables, *latex)
    assert "<script>alert" not in page
    assert "\x1b" not in "".join(texts)
    cells = [cell for table in tables for line in table.splitlines() for cell in line.split(",")]
    assert not [cell for cell in cells if cell.lstrip('"')[:2] in ("=1", "\x1b[")]


def list_readers(kept: Kept, path: Path, chance: random.Random) -> list[Reader]:
    """Return the name and the function of everything that reads a file."""

    def command(*words: str) -> Reader:
        return "kvlab " + " ".join(words), partial(kvlab, [*words, "--store", str(kept.path)])

    name = kept.owner(path)
    known = path.parts[-2] if path.parts[-2] in kept.by_trial else next(iter(kept.by_trial))
    readers = [command("status", name), command("logs", known), command("logs", name)]
    if chance.random() < 0.3:
        readers.append(command("status"))
        if "gc" in COMMANDS:
            readers.append(command("gc", "--weights", "--unused", "--pruned"))
    if "trials" in path.parts or "sweeps" in path.parts:
        readers.append(("report", partial(make_report, kept.path, name)))
        if "live" in COMMANDS:
            from kvlab.extensions.live_page.server import LivePage

            page = LivePage(Store(kept.path), kept.folder / "live")
            readers.append(("live page", lambda: page.describe_sweep(name) and None))
        if "compare" in COMMANDS and chance.random() < 0.3:
            readers.append(command("compare", name, next(iter(kept.rows))))
    if chance.random() < 0.05:
        copied = str(kept.folder / "copied")
        readers += [command("copy", name, "--to", copied), command("copy", name, "--from", copied)]
    return readers


# Cases


def check_case(number: int, stores: list[Kept], outcomes: Counter[str]) -> str | None:
    """Run one case; return what is wrong, None if nothing."""
    chance = random.Random(number)
    kept, chosen = _choose_files(stores, chance)
    damages, checked = dict[Path, str](), list[Path]()
    for path in chosen:
        before = path.read_bytes()
        damages[path] = damage_file(path, chance, [one for one in kept.files if one.is_file()])
        is_same = path.is_file() and path.stat().st_size < 1 << 26 and path.read_bytes() == before
        checked += [path] * (not is_same and is_verified(path))
    is_forged = any(how.startswith("sealed") for how in damages.values())
    readers = [] if is_forged else [("numbers", partial(check_numbers, kept, checked))]
    readers += list_readers(kept, chosen[0], chance)
    readers.append(("heal", partial(check_healed, kept, is_forged)))
    texts = (f"{how} in {path.relative_to(kept.folder.parent)}" for path, how in damages.items())
    is_refused = False
    try:
        for name, reader in readers:
            problem, refuses = run_reader(reader, is_log=name.startswith("kvlab logs"))
            is_refused |= refuses
            if problem is not None:
                outcomes["failed"] += 1
                return f"case {number}: {'; '.join(texts)}, {name}: {problem}"
        is_aside = any(kept.folder.glob("*/*/*/damaged")) or any(kept.folder.glob("*/*/damaged"))
        outcomes["healed" if is_aside else "refused" if is_refused else "harmless"] += 1
    finally:
        kept.restore()
    return None


def _choose_files(stores: list[Kept], chance: random.Random) -> tuple[Kept, list[Path]]:
    """Return one file, each kind as often, however many there are; or some of its sweep."""
    kinds: dict[str, list[tuple[Kept, Path]]] = {}
    for kept in stores:
        for path in kept.files:
            name = re.sub(r"\d+", "", f"{path.name.split('.')[0]}{path.suffix}")
            kinds.setdefault(f"{kept.folder.name} {name}", []).append((kept, path))
    kept, first = chance.choice(kinds[chance.choice(sorted(kinds))])
    if chance.random() < 0.6 or "datasets" in first.parts:
        return kept, [first]
    near = [one for one in kept.files if "runs" in one.parts and one != first]
    near = [one for one in near if kept.owner(one) == kept.owner(first)]
    return kept, [first, *chance.sample(near, min(len(near), chance.choice((1, 1, 2))))]


def is_verified(path: Path) -> bool:
    """Return whether `kvlab verify` tells of every damage of a file, if that is still there."""
    if path.name in UNSEALED:
        return False
    if path.name in DETAIL_FILES:  # which a result lists, if there is one
        return (path.parent / "result.json").exists()
    return "datasets" in path.parts or ".json" in path.name or ".safetensors" in path.name


def verify(kept: Kept, *words: str) -> int:
    return kvlab(["verify", *words, "--store", str(kept.path)])


def check_numbers(kept: Kept, damaged: list[Path]) -> None:
    """Check that verification tells of damaged files, and that no trial says something else."""
    found = verify(kept) if damaged else 0
    assert found or not any(map(os.path.lexists, damaged)), "kvlab verify finds nothing"
    sweeps = {kept.owner(path) for path in damaged if "sweeps" in path.parts}
    for name in {kept.owner(path) for path in damaged} - sweeps:
        for key, row in kept.read_rows(name).items():
            is_whole = repr(row) == kept.rows[name][key] or row.status in ("damaged", "missing")
            assert is_whole, f"{key} of {name} says {row!r:.500}"


def check_healed(kept: Kept, is_forged: bool) -> None:
    """Heal the record, submit the sweep, and check what comes of it."""
    verify(kept, "--heal")
    if kept.submit is not None:
        heal(Store(kept.path).sweep_directory("s"))
        kept.submit()
        verify(kept, "--heal")  # what a lock had kept
    assert verify(kept) == 0, "it does not verify in the end"
    if kept.submit is not None and not is_forged:
        end = kept.read_end()
        wrong = {key for key in kept.end.keys() | end.keys() if end.get(key) != kept.end.get(key)}
        assert not wrong, f"differ in the end: {wrong}"


def run_cases(first: int, count: int) -> Counter[str]:
    """Run cases and print what is wrong; return how many ended in which way."""
    outcomes = Counter[str]()
    os.environ["KVLAB_LEASE_SECONDS"], lock.GRACE_SECONDS = "1", 0.0
    with tempfile.TemporaryDirectory() as name:
        stores = [make(Path(name, make.__name__.removeprefix("make_"))) for make in MAKERS]
        for kept in stores:
            kept.keep()
        for number in range(first, first + count):
            problem = check_case(number, stores, outcomes)
            if problem is not None or number % 50 == 49:
                print(problem or f"up to case {number}: {dict(outcomes)}", flush=True)
    return outcomes


def main() -> int:
    options = read_options(__doc__, cases=1000, first=0)
    outcomes = run_cases(options.first, options.cases)
    print(f"{options.cases} cases, {outcomes.pop('failed', 0)} failed; {dict(outcomes)}")
    return int(outcomes.total() < options.cases)
