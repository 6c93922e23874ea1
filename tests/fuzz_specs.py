"""Fuzzing of what people write: mutated specs through the commands that read them.

    python -m tests.fuzz_specs --cases 10000 --first 0

A case takes a valid experiment and sweep, damages one of them in one to four places (values,
keys, structure, or bytes), and plans it. Every case must end with exit code 0, or with 2 and
text in which each line says where by file, line and column. What is accepted and small is also
submitted (unless it needs a download), with stages that only write files, into a store. Never a traceback, and never a file
outside the store: not in the working folder, HOME, the specs' folder or the one above.
A case follows from its number alone.
"""

import argparse
import copy
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvlab.cli.commands import submit
from kvlab.cli.main import main as kvlab
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.executors.capacity import cpu_count
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.stub_trials import StubRun

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "model": {"vocab_size": 257, "block_size": 16, "n_layer": 4, "n_head": 4, "n_embd": 16},
    "data": {
        "source": "files",
        "paths": ["texts"],
        "tokenizer": "bytes",
        "validation_fraction": 0.4,
    },
    "training": {"tokens": 320, "batch_tokens": 16, "learning_rate": 1e-3},
    "serving": {"kv_dtype": "model"},
    "evaluation": {"loss_tokens": 64, "hellaswag": 0},
    "benchmark": {"prompt_tokens": 4, "new_tokens": 4, "batch_sizes": [1, 2]},
    "resources": {"cpus": 1, "microbatch_tokens": 16},
}
FACTORS: dict[str, Any] = {
    "heads": {"mha": {}, "mqa": {"model.n_kv_head": 1}},
    "horizon": {"global": {}, "hybrid": {"model.attention_pattern": "GL"}},
    "window": {"w8": {"model.window": 8}, "w4": {"model.window": 4}},
    "sharing": {"none": {}, "tied": {"serving.tie": "adjacent:2"}},
}
SWEEP: dict[str, Any] = {
    "question": "What does it cost?",
    "experiment": "e.yaml",
    "factors": FACTORS,
    "baseline": {"heads": "mha"},
    "design": "full",
    "when": {"window": {"horizon": "hybrid"}},
    "exclude": [{"heads": "mqa", "sharing": "tied"}],
    "include": [{"heads": "mqa", "sharing": "tied"}],
    "seeds": [0, 1],
    "failures": {"killed_retries": 2},
}
SEARCH: dict[str, Any] = {
    "question": "What is best?",
    "experiment": "e.yaml",
    "search": {
        "ranges": {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
        "choices": {"model.n_kv_head": [1, 2, 4]},
        "objectives": ["loss", "kv_bytes"],
        "limits": {"parameters": {"at_most": 1e6}},
        "trials": 4,
    },
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 10**6, 10**15, 10**18, 10**400, -0.0, 0.5, 1e-300, 1e300,
    float("nan"), float("inf"), "", " ", "x", "mha", "full", "one_factor", "pairwise", "cumulative",
    "leave_one_out", "cells", "fractional:2", "fractional:4", "fractional:0", "none", "adjacent:2",
    "adjacent:0", "adjacent:99999999999999", "trailing:3", "character-ai", "GL", "L" * 10_001,
    "../../etc/passwd", "/", "e.yaml", "s.yaml", ".", "~", "a" * 300, "\u202e\U0001f600", "a\nb",
    "model.n_kv_head", "*", "&a", "!!python/object", "${HOME}", "{{ x }}", "%s", [], {}, [[]], [{}], {"": 1},
    [0, 1], [[0, 1], [2, 3]], [0, 0, 2, 2], {"heads": "mqa"}, {"heads": ["mha", "mqa"]}, [{"horizon": "hybrid"}],
    {"model.n_head": 3}, {"low": 1, "high": 2}, {"at_most": 1}, [["heads", "window"]], list(range(50)),
]  # fmt: skip
KEYS = [
    "design", "designs", "zip", "when", "target", "cells", "generators", "exclude", "include", "seeds",
    "search", "failures", "model", "preset", "kv_sharing", "tie", "window", "point", "base", "init_from",
    "a.b", ".", "", "model.window", "training.init_from", "__class__", "../x", "\u00e9",
]  # fmt: skip


def files(number: int) -> dict[str, bytes]:
    """The two files of case ``number``."""
    rng = random.Random(number)
    specs = {"e.yaml": EXPERIMENT, "s.yaml": SEARCH if rng.random() < 0.2 else SWEEP}
    copies = copy.deepcopy(specs)
    victim = "e.yaml" if rng.random() < 0.3 else "s.yaml"
    for _ in range(rng.randint(1, 4)):
        _damage(rng, copies[victim])
    written = {name: yaml.safe_dump(data, sort_keys=False) for name, data in copies.items()}
    raw = {name: text.encode() for name, text in written.items()}
    if rng.random() < 0.25:
        raw[victim] = _bytes(rng, raw[victim])
    return raw


def _damage(rng: random.Random, data: Any) -> None:
    """Changes one place of nested data."""
    places = list(_places(data))
    if not places:
        return
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        case 2:
            del holder[key]
        case 3 if isinstance(holder, dict):
            holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
        case 4 if isinstance(holder, dict):
            holder[rng.choice([*KEYS, str(key)[:-1], str(key) + "s"])] = holder.pop(key)
        case _:
            holder[key] = [holder[key]]


def _places(data: Any) -> Any:
    keys = list(data) if isinstance(data, dict) else range(len(data))
    for key in keys:
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _places(data[key])


def _bytes(rng: random.Random, raw: bytes) -> bytes:
    """Damages the text itself."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(changed) or 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[at : at + rng.randint(1, 20)]
            case 2:
                changed[at:at] = rng.choice(
                    [b"\t", b"{", b"[", b": ", b"- ", b"&a ", b"*a ", b"'", b"\x00", b"\xff"]
                )
            case 3:
                changed[at:at] = changed[at : at + rng.randint(1, 60)]
    return bytes(changed)


WHERE = re.compile(r".*[es]\.yaml:\d+:\d+: \S")
"""How every line of a refusal begins."""

MOST_TRIALS, MOST_STEPS = 20, 40
"""Of an accepted sweep that is run, with stages that only write files."""


class Place:
    """A folder to work in, watched as a whole: specs, a store, HOME and the working folder."""

    def __init__(self, root: Path):
        self.root, self.specs = root.resolve(), root.resolve() / "specs"
        self.store = self.root / "runs"
        for name in ("specs", "home", "work", "data"):
            (self.root / name).mkdir()
        (self.specs / "texts").mkdir()
        for number in range(4):
            (self.specs / "texts" / f"{number}.txt").write_text(f"text {number}\n" * 90)
        for name in ("e.yaml", "s.yaml"):
            (self.specs / name).touch()
        self._there = self._paths()

    @contextmanager
    def entered(self) -> Iterator["Place"]:
        """Works there, with nothing set from outside."""
        before, environment = os.getcwd(), dict(os.environ)
        os.chdir(self.root / "work")
        os.environ.update(HOME=str(self.root / "home"), KVLAB_DATA=str(self.root / "data"))
        for name in ("KVLAB_STORE", "MLFLOW_TRACKING_URI", "KVLAB_COPY_TO", "KVLAB_NOTIFY"):
            os.environ.pop(name, None)
        try:
            yield self
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)

    def stray(self, *, store: bool) -> list[str]:
        """Files and folders that should not be there; the store's may be if it was used."""
        found = self._paths() - self._there
        if store:
            found = {path for path in found if not f"{path}{os.sep}".startswith(f"{self.store}/")}
        self._there |= found  # each is told once
        return sorted(found)

    def _paths(self) -> set[str]:
        """All but prepared texts, whose folder is where they belong."""
        found = set()
        for folder, folders, names in os.walk(self.root):
            found |= {f"{folder}{os.sep}{name}" for name in (*folders, *names)}
            folders[:] = [name for name in folders if name != "data"]
        return found


def check(number: int, place: Place) -> str | None:
    """What is wrong with case ``number``, None if nothing."""
    for name, raw in files(number).items():
        (place.specs / name).write_bytes(raw)
    said = _call("plan", place, "--json")
    if isinstance(said, str):
        return said
    code, out, error = said
    if stray := place.stray(store=False):
        return f"plan left files behind: {stray}"
    if code == 2:
        lines = error.splitlines()
        unplaced = [line for line in lines if not WHERE.match(line)]
        if not lines or unplaced:
            return f"says not where: {unplaced[:3] or error}"
        return None
    if code != 0 or error:
        return f"exit code {code}: {error[:300]}"
    return _submitted(json.loads(out), place)


def _submitted(facts: dict[str, Any], place: Place) -> str | None:
    """Runs an accepted sweep that is small, to its end."""
    trials = facts["trials"]
    cells = [cell.experiment for cell in load_sweep(place.specs / "s.yaml").cells()]
    steps = max(experiment.training.steps for experiment in cells)
    downloads = any(experiment.evaluation.hellaswag for experiment in cells)
    if facts["text_absent"] or downloads or len(trials) > MOST_TRIALS or steps > MOST_STEPS:
        return None
    try:
        said = _call("submit", place, "--executor", "inline", "--no-report", "--no-smoke")
        if isinstance(said, str):
            return f"submit: {said}"
        code, out, error = said
        if stray := place.stray(store=True):
            return f"submit left files behind: {stray}"
        if code == 2:
            return None if error.strip() else "submit refuses without a word"
        if code == 1 and len(error.splitlines()) == 1 and "missing" not in out:
            return None  # of the data, such as too little held-out text
        if code != 0 or error:
            return f"submit: exit code {code}: {error[:300]}{out[-300:]}"
        ended = Store(place.store).trial_ids()
        wrong = {one["trial"] for one in trials} - set(ended)
        return f"submit: not recorded: {sorted(wrong)}" if wrong else None
    finally:
        shutil.rmtree(place.store, ignore_errors=True)


def _call(command: str, place: Place, *options: str) -> tuple[int, str, str] | str:
    """Exit code, standard output and standard error; or the exception that came through."""
    out, error = io.StringIO(), io.StringIO()
    words = [command, str(place.specs / "s.yaml"), "--store", str(place.store), *options]
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = kvlab(words)
    except (Exception, SystemExit) as caught:
        return f"{type(caught).__name__}: {caught}"
    if "Traceback" in error.getvalue():
        return error.getvalue()
    return code, out.getvalue(), error.getvalue()


@contextmanager
def stub_stages() -> Iterator[None]:
    """Lets ``--executor inline`` record real trials around stages that only write files, and
    tells MLflow nothing: that would be most of the time."""
    real, mirror = EXECUTORS["inline"], submit.MLflowCallback

    class Silent(mirror):  # type: ignore[valid-type, misc]
        def on_result(self, trial_id: str) -> None: ...

        def finish(self, report: Path | None) -> None: ...

    def stub(run: Any, address: str | None) -> Any:  # noqa: ARG001
        return InlineExecutor(StubRun(run.keywords["store"]))

    entry = replace(real, make=stub)
    EXECUTORS["inline"], submit.MLflowCallback = entry, Silent  # type: ignore[misc]
    try:
        yield
    finally:
        EXECUTORS["inline"], submit.MLflowCallback = real, mirror  # type: ignore[misc]


def problems(numbers: range) -> dict[int, str]:
    """What is wrong with these cases; in a folder of its own, which is taken away."""
    with (
        tempfile.TemporaryDirectory() as name,
        Place(Path(name)).entered() as place,
        stub_stages(),
    ):
        found = {number: check(number, place) for number in numbers}
    return {number: text for number, text in found.items() if text is not None}


def search(first: int, cases: int) -> dict[int, str]:
    """What is wrong with ``cases`` cases from ``first`` on, on every core."""
    count = cpu_count()
    parts = [range(first + part, first + cases, count) for part in range(count)]
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        found = pool.map(problems, parts)
    return {number: text for part in found for number, text in sorted(part.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    found = search(options.first, options.cases)
    for number, problem in found.items():
        print(f"case {number}: {problem}")
    print(f"{options.cases:,} mutated specs, {len(found)} problems")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
