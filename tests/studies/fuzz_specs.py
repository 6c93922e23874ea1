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
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab.machine import cpu_count
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.executors.inline import InlineExecutor
from tests.studies import read_options
from tests.support.stub_trials import StubRun
from tests.support.tiny_sweep import run_kvlab, tiny_sweep_folder

EXPERIMENT = """
name: tiny
model: {vocab_size: 257, block_size: 16, n_layer: 4, n_head: 4, n_embd: 16}
data: {source: files, paths: [texts], tokenizer: bytes, validation_fraction: 0.4}
training: {tokens: 320, batch_tokens: 16, learning_rate: 0.001}
serving: {kv_dtype: model}
evaluation: {loss_tokens: 64, hellaswag: 0}
benchmark: {prompt_tokens: 4, new_tokens: 4, batch_sizes: [1, 2]}
resources: {cpus: 1, microbatch_tokens: 16}
"""
SWEEP = """
question: What does it cost?
experiment: e.yaml
factors:
  heads: {mha: {}, mqa: {model.n_kv_head: 1}}
  horizon: {global: {}, hybrid: {model.attention_pattern: GL}}
  window: {w8: {model.window: 8}, w4: {model.window: 4}}
  sharing: {none: {}, tied: {serving.tie: "adjacent:2"}}
baseline: {heads: mha}
design: full
when: {window: {horizon: hybrid}}
exclude: [{heads: mqa, sharing: tied}]
include: [{heads: mqa, sharing: tied}]
seeds: [0, 1]
failures: {killed_retries: 2}
"""
TUNED = """
match: parameters
tune: {training.learning_rate: [0.001, 0.002, 0.004], seeds: [100], share: [window]}
"""
SEARCH = """
question: What is best?
experiment: e.yaml
search:
  ranges: {training.learning_rate: {low: 0.0001, high: 0.01, log: true}}
  choices: {model.n_kv_head: [1, 2, 4]}
  objectives: [loss, kv_bytes]
  limits: {parameters: {at_most: 1.0e+6}}
  trials: 4
"""
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
    "design", "designs", "when", "target", "cells", "exclude", "include", "seeds",
    "search", "failures", "match", "tune", "share", "model", "preset", "kv_sharing", "tie", "window", "point", "base", "init_from",
    "a.b", ".", "", "model.window", "training.init_from", "__class__", "../x", "\u00e9",
]  # fmt: skip


def make_files(number: int) -> dict[str, bytes]:
    """Return the two files of case ``number``."""
    rng = random.Random(number)
    kind = rng.random()
    sweep = SEARCH if kind < 0.2 else SWEEP + TUNED if kind < 0.4 else SWEEP
    specs = {"e.yaml": yaml.safe_load(EXPERIMENT), "s.yaml": yaml.safe_load(sweep)}
    victim = "e.yaml" if rng.random() < 0.3 else "s.yaml"
    for _ in range(rng.randint(1, 4)):
        _damage_data(rng, specs[victim])
    texts = {name: yaml.safe_dump(data, sort_keys=False) for name, data in specs.items()}
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


@contextmanager
def in_workspace(root: Path) -> Iterator[set[str]]:
    """Work in a folder beside specs, HOME and data, with stages that only write files.

    Yields:
        The paths below ``root`` that are expected there.
    """
    for name in ("specs", "home", "work", "data"):
        (root / name).mkdir()

    def make_stub(run: Any, address: str | None) -> Any:  # noqa: ARG001
        return InlineExecutor(StubRun(run.keywords["store"]))

    with tiny_sweep_folder(root / "specs"), pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "work")
        patch.setenv("HOME", str(root / "home"))
        patch.setenv("KVLAB_DATA", str(root / "data"))
        patch.setitem(EXECUTORS, "inline", replace(EXECUTORS["inline"], make=make_stub))
        yield list_paths(root)


def list_paths(root: Path) -> set[str]:
    """Return all paths but prepared texts, which belong where they are."""
    paths = set()
    for folder, folders, names in os.walk(root):
        paths |= {f"{folder}{os.sep}{name}" for name in (*folders, *names)}
        folders[:] = [name for name in folders if name != "data"]
    return paths


def check_case(number: int, root: Path, expected: set[str]) -> None:
    """Try case ``number``.

    Raises:
        AssertionError: A command prints a traceback, fails otherwise than it may, or leaves files.
    """
    sweep, store = root / "specs" / "s.yaml", root / "runs"
    for name, raw in make_files(number).items():
        sweep.with_name(name).write_bytes(raw)

    def call(command: str, *options: str) -> tuple[int, str, str]:
        code, out, error = run_kvlab(command, sweep, "--store", store, *options)
        assert "Traceback" not in error, error
        strays = list_paths(root) - expected
        strays = {path for path in strays if not f"{path}/".startswith(f"{store}/")}
        expected.update(strays)  # each is told of once
        assert not strays, f"{command} left files behind: {sorted(strays)}"
        return code, out, error

    code, out, error = call("plan", "--json", "--rate", "1e12")
    assert not store.exists(), "plan makes a store"
    if code == 2:
        unplaced = [line for line in error.splitlines() if not ERROR_LINE.match(line)]
        assert error, "plan fails without a message"
        assert not unplaced, f"no place in: {unplaced[:3]}"
        return
    assert (code, error) == (0, ""), f"exit code {code}: {error[:300]}"
    if not is_small(sweep, len(json.loads(out)["trials"])):
        return
    code, out, error = call("submit", "--executor", "inline", "--no-report", "--no-smoke")
    if code == 2 or (code == 1 and len(error.splitlines()) == 1 and "missing" not in out):
        assert error.strip(), "submit fails without a message"
        return  # an error of the data, such as too little held-out text
    assert (code, error) == (0, ""), f"submit: exit code {code}: {error[:300]}{out[-300:]}"
    recorded = Store(store).trial_ids()
    # again: the text is prepared by now
    planned = json.loads(call("plan", "--json", "--rate", "1e12")[1])["trials"]
    missing = {trial["trial"] for trial in planned} - set(recorded)
    assert not missing, f"submit: not recorded: {sorted(missing)}"


def is_small(path: Path, trials: int) -> bool:
    """Return whether an accepted sweep is submitted."""
    cells = [cell.experiment for cell in load_sweep(path).cells()]
    steps = max(experiment.training.steps for experiment in cells)
    downloads = any(one.evaluation.hellaswag or "fineweb" in one.data.source for one in cells)
    return not downloads and trials <= MAX_TRIALS and steps <= MAX_STEPS


def find_problems(numbers: range) -> dict[int, str]:
    """Return what is wrong with these cases, run in a temporary folder."""
    problems = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        with in_workspace(root) as expected:
            for number in numbers:
                try:
                    check_case(number, root, expected)
                except (Exception, SystemExit) as caught:
                    problems[number] = f"{type(caught).__name__}: {caught}"
                shutil.rmtree(root / "runs", ignore_errors=True)
    return problems


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
