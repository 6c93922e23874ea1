"""Fuzzing of the record: damaged files through every command that reads them.

    python -m tests.fuzz_record --cases 10000 --first 0

A case damages one file of a small store: a bit flipped, cut, emptied, zeroed, replaced by a file
of another kind, by deep or long JSON, by a value of another type, or by a pipe. Half of the JSON
records get a new, valid seal afterwards, as somebody would write who means harm. Then commands
read the store. Each must end within seconds, with an exit code of 0, 1 or 2 and without a
traceback. Afterwards `kvlab verify --heal` must leave a record that verifies, unless the damage is
sealed. A case follows from its number alone.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.cli.main import main as kvlab
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.store import Store
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, drive, tiny_plan

SECONDS = 20
"""Time within which a command has to end."""

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 10**40, "", "x", "\x1b[31m\u202e", "../../x", [], {}, [[]], {"a": {}},
)  # fmt: skip


def make_store(folder: Path) -> Store:
    """Write a store with eight finished trials, one of them as if it ran still."""
    store = Store(folder / "runs")
    planned = tiny_plan(folder, store)
    drive(planned, store, StubRun(store.path))
    store.write_sweep(describe_sweep(planned, yaml="y", experiment_yaml="e", command="c"))
    store.note_report("s", [0, 1])
    first = store.trial_ids()[0]
    state = {"stage": "training", "step": 1, "steps": 20, "loss": 1.0}
    (store.trial_directory(first) / "progress.json").write_text(json.dumps(state))
    return store


def damage_file(path: Path, chance: random.Random, others: list[Path]) -> str:
    """Damage a file and return how."""
    data = path.read_bytes()
    kinds = ["flip", "cut", "empty", "zeros", "other", "text", "deep", "long", "pipe"]
    kind = chance.choice(kinds + ["value"] * 6 * path.name.endswith(".json"))
    if kind == "flip" and data:
        place = chance.randrange(len(data))
        path.write_bytes(
            data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
        )
    elif kind == "cut":
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif kind == "zeros":
        path.write_bytes(bytes(len(data)))
    elif kind == "other":
        shutil.copyfile(chance.choice(others), path)
    elif kind == "text":
        path.write_bytes(bytes(chance.randrange(256) for _ in range(200)))
    elif kind == "deep":
        path.write_text("[" * 200_000)
    elif kind == "long":
        path.write_text('{"a": "' + "x" * 5_000_000 + '"}')
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "value":
        return _change_value(path, chance)
    else:
        path.write_bytes(b"")
    return kind


def _change_value(path: Path, chance: random.Random) -> str:
    """Replace one value of a JSON file by one of another type; seal it anew in half of the cases."""
    content = json.loads(path.read_bytes())
    seal = content.pop("sha256", None)
    places = list(_find_places(content))
    container, key = chance.choice(places)
    container[key] = chance.choice(_VALUES)
    if seal is not None and chance.random() < 0.5:
        write_sealed_json(path, content)
        return "sealed value"
    path.write_text(json.dumps(content if seal is None else {**content, "sha256": seal}))
    return "value"


def _find_places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _find_places(item)


def run_command(command: list[str]) -> str | None:
    """Run a command in this process; return what is wrong with how it ended, None if nothing."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = kvlab(command)
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    text = out.getvalue() + err.getvalue()
    if code not in (0, 1, 2) or "Traceback" in text or "\x1b[31m" in text or "\u202e" in text:
        return f"exit code {code}: {text[-2000:]}"
    return None


def check_case(number: int, template: Path, folder: Path) -> str | None:
    """Run one case; return what is wrong, None if nothing."""
    chance = random.Random(number)
    shutil.copytree(template, folder)
    store = Store(folder / "runs")
    files = sorted(
        path for path in store.path.rglob("*") if path.is_file() and ".safetensors" not in path.name
    )
    path = chance.choice(files)
    kind = damage_file(path, chance, files)
    where = f"case {number}: {kind} in {path.relative_to(store.path)}"
    trial = chance.choice(store.trial_ids())
    reports = ["--reports", str(folder / "reports")]
    commands = [
        ["status"], ["status", "s"], ["logs", trial], ["verify"], ["verify", "s", "--json"], ["gc"],
        *([["report", "s", *reports]] if "value" in kind or number % 10 == 0 else []),
        ["verify", "--heal"], ["verify"],
    ]  # fmt: skip
    for command in commands:
        problem = run_command([*command, "--store", str(store.path)])
        if problem is not None:
            return f"{where}, kvlab {' '.join(command)}: {problem}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        template = Path(name) / "template"
        template.mkdir()
        make_store(template)
        for number in range(options.first, options.first + options.cases):
            folder = Path(name) / "case"
            problem = check_case(number, template, folder)
            shutil.rmtree(folder)
            if problem is not None:
                failed += 1
                print(problem, flush=True)
    print(f"{options.cases} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
