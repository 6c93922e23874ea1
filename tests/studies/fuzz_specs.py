"""Fuzzing of specs: mutated experiments and sweeps through the commands that read them.

    python -m tests.studies fuzz_specs --cases 10000 --first 0

A case takes a valid experiment and sweep, damages one of them in one to four places (values,
keys, structure, or bytes), and plans it. Every case must end with exit code 0, or with 2 and an
error message of which each line has a file, line and column. An accepted sweep that is small is
also submitted, unless it needs a download, with stages that only write files. There must be no
traceback, and no file outside the store: not in the working folder, HOME, the specs' folder or
the one above. A case follows from its number alone.
"""

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
from tests.studies import read_options
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
FAIR: dict[str, Any] = {
    **SWEEP,
    "match": ["none", "parameters"],
    "tune": {"training.learning_rate": [1e-3, 2e-3, 4e-3], "seeds": [100], "share": ["window"]},
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
    "search", "failures", "match", "tune", "share", "model", "preset", "kv_sharing", "tie", "window", "point", "base", "init_from",
    "a.b", ".", "", "model.window", "training.init_from", "__class__", "../x", "\u00e9",
]  # fmt: skip


def make_files(number: int) -> dict[str, bytes]:
    """Return the two files of case ``number``."""
    rng = random.Random(number)
    kind = rng.random()
    sweep = SEARCH if kind < 0.2 else FAIR if kind < 0.4 else SWEEP
    specs = {"e.yaml": EXPERIMENT, "s.yaml": sweep}
    copies = copy.deepcopy(specs)
    victim = "e.yaml" if rng.random() < 0.3 else "s.yaml"
    for _ in range(rng.randint(1, 4)):
        _damage_data(rng, copies[victim])
    texts = {name: yaml.safe_dump(data, sort_keys=False) for name, data in copies.items()}
    raw = {name: text.encode() for name, text in texts.items()}
    if rng.random() < 0.25:
        raw[victim] = _damage_bytes(rng, raw[victim])
    return raw


def _damage_data(rng: random.Random, data: Any) -> None:
    """Change one value, key or structure of nested data."""
    entries = list(_iter_entries(data))
    if not entries:
        return
    holder, key = rng.choice(entries)
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


def _iter_entries(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in nested data with each of its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data))
    for key in keys:
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _iter_entries(data[key])


def _damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 5)):
        index = rng.randrange(len(changed) or 1)
        match rng.randrange(4):
            case 0:
                changed[index : index + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[index : index + rng.randint(1, 20)]
            case 2:
                changed[index:index] = rng.choice(
                    [b"\t", b"{", b"[", b": ", b"- ", b"&a ", b"*a ", b"'", b"\x00", b"\xff"]
                )
            case 3:
                changed[index:index] = changed[index : index + rng.randint(1, 60)]
    return bytes(changed)


ERROR_LINE = re.compile(r".*[es]\.yaml:\d+:\d+: \S")
"""How every line of an error message begins."""

MAX_TRIALS, MAX_STEPS = 20, 40
"""Of an accepted sweep that is submitted."""


class Workspace:
    """A watched folder with specs, a store, HOME and a working folder."""

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
        self._expected_paths = self._list_paths()

    @contextmanager
    def entered(self) -> Iterator["Workspace"]:
        """Work in this folder, with no setting from outside."""
        folder, environment = os.getcwd(), dict(os.environ)
        os.chdir(self.root / "work")
        os.environ.update(HOME=str(self.root / "home"), KVLAB_DATA=str(self.root / "data"))
        for name in ("KVLAB_STORE", "MLFLOW_TRACKING_URI", "KVLAB_COPY_TO", "KVLAB_NOTIFY"):
            os.environ.pop(name, None)
        try:
            yield self
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)

    def find_strays(self, *, store: bool) -> list[str]:
        """Return new files and folders, each once; those in the store count unless ``store``."""
        strays = self._list_paths() - self._expected_paths
        if store:
            strays = {path for path in strays if not f"{path}{os.sep}".startswith(f"{self.store}/")}
        self._expected_paths |= strays
        return sorted(strays)

    def _list_paths(self) -> set[str]:
        """All paths but prepared texts, which belong where they are."""
        paths = set()
        for folder, folders, names in os.walk(self.root):
            paths |= {f"{folder}{os.sep}{name}" for name in (*folders, *names)}
            folders[:] = [name for name in folders if name != "data"]
        return paths


def check_case(number: int, workspace: Workspace) -> str | None:
    """Return what is wrong with case ``number``, None if nothing is."""
    for name, raw in make_files(number).items():
        (workspace.specs / name).write_bytes(raw)
    outcome = _call("plan", workspace, "--json", "--rate", "1e12")
    if isinstance(outcome, str):
        return outcome
    code, out, error = outcome
    if strays := workspace.find_strays(store=False):
        return f"plan left files behind: {strays}"
    if code == 2:
        lines = error.splitlines()
        unplaced = [line for line in lines if not ERROR_LINE.match(line)]
        if not lines or unplaced:
            return f"no place in: {unplaced[:3] or error}"
        return None
    if code != 0 or error:
        return f"exit code {code}: {error[:300]}"
    return _check_submit(json.loads(out), workspace)


def _check_submit(facts: dict[str, Any], workspace: Workspace) -> str | None:
    """Run an accepted sweep to its end if it is small."""
    trials = facts["trials"]
    cells = [cell.experiment for cell in load_sweep(workspace.specs / "s.yaml").cells()]
    steps = max(experiment.training.steps for experiment in cells)
    downloads = any(one.evaluation.hellaswag or "fineweb" in one.data.source for one in cells)
    if downloads or len(trials) > MAX_TRIALS or steps > MAX_STEPS:
        return None
    try:
        outcome = _call("submit", workspace, "--executor", "inline", "--no-report", "--no-smoke")
        if isinstance(outcome, str):
            return f"submit: {outcome}"
        code, out, error = outcome
        if strays := workspace.find_strays(store=True):
            return f"submit left files behind: {strays}"
        if code == 2:
            return None if error.strip() else "submit fails without a message"
        if code == 1 and len(error.splitlines()) == 1 and "missing" not in out:
            return None  # an error of the data, such as too little held-out text
        if code != 0 or error:
            return f"submit: exit code {code}: {error[:300]}{out[-300:]}"
        recorded = Store(workspace.store).trial_ids()
        # again: the text is prepared by now
        planned = _call("plan", workspace, "--json", "--rate", "1e12")
        assert not isinstance(planned, str), planned
        missing = {trial["trial"] for trial in json.loads(planned[1])["trials"]} - set(recorded)
        return f"submit: not recorded: {sorted(missing)}" if missing else None
    finally:
        shutil.rmtree(workspace.store, ignore_errors=True)


def _call(command: str, workspace: Workspace, *options: str) -> tuple[int, str, str] | str:
    """Exit code, standard output and standard error; or the exception that was raised."""
    out, error = io.StringIO(), io.StringIO()
    words = [command, str(workspace.specs / "s.yaml"), "--store", str(workspace.store), *options]
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = kvlab(words)
    except (Exception, SystemExit) as caught:
        return f"{type(caught).__name__}: {caught}"
    if "Traceback" in error.getvalue():
        return error.getvalue()
    return code, out.getvalue(), error.getvalue()


@contextmanager
def stub_submit() -> Iterator[None]:
    """Replace the stages of ``--executor inline`` by ones that only write files, and MLflow, which
    would take most of the time, by nothing."""
    inline, callback = EXECUTORS["inline"], submit.MLflowCallback

    class NoMLflow(callback):  # type: ignore[valid-type, misc]
        def on_result(self, trial_id: str) -> None: ...

        def finish(self, report: Path | None) -> None: ...

    def make_stub(run: Any, address: str | None) -> Any:  # noqa: ARG001
        return InlineExecutor(StubRun(run.keywords["store"]))

    EXECUTORS["inline"] = replace(inline, make=make_stub)
    submit.MLflowCallback = NoMLflow  # type: ignore[misc]
    try:
        yield
    finally:
        EXECUTORS["inline"] = inline
        submit.MLflowCallback = callback  # type: ignore[misc]


def find_problems(numbers: range) -> dict[int, str]:
    """Return what is wrong with these cases, run in a temporary folder."""
    with (
        tempfile.TemporaryDirectory() as name,
        Workspace(Path(name)).entered() as workspace,
        stub_submit(),
    ):
        results = {number: check_case(number, workspace) for number in numbers}
    return {number: text for number, text in results.items() if text is not None}


def search_problems(first: int, cases: int) -> dict[int, str]:
    """Return what is wrong with ``cases`` cases from ``first`` on, run on every core."""
    count = cpu_count()
    shares = [range(first + share, first + cases, count) for share in range(count)]
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        results = pool.map(find_problems, shares)
    return {number: text for result in results for number, text in sorted(result.items())}


def main() -> int:
    options = read_options(__doc__, cases=10_000, first=0)
    problems = search_problems(options.first, options.cases)
    for number, problem in problems.items():
        print(f"case {number}: {problem}")
    print(f"{options.cases:,} mutated specs, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
