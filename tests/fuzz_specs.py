"""Fuzzing of what people write: mutated specs through the commands that read them.

    python -m tests.fuzz_specs --cases 10000 --first 0

A case takes a valid experiment and sweep, damages one of them in one to four places (values,
keys, structure, or bytes), and plans it. Every case must end with exit code 0, or with 2 and
text in which each line says where: never a traceback, never a file that was not there before.
A case follows from its number alone.
"""

import argparse
import copy
import io
import random
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from kvlab.cli.main import main as kvlab

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "model": {"vocab_size": 257, "block_size": 16, "n_layer": 4, "n_head": 4, "n_embd": 16},
    "data": {"source": "files", "paths": ["text.txt"], "tokenizer": "bytes"},
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
    copies = {name: yaml.safe_load(yaml.safe_dump(data)) for name, data in specs.items()}
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


def check(number: int, folder: Path) -> str | None:
    """What is wrong with case ``number``, None if nothing. ``folder`` holds text.txt alone."""
    written = files(number)
    for name, raw in written.items():
        (folder / name).write_bytes(raw)
    out, err = io.StringIO(), io.StringIO()
    command = ["plan", str(folder / "s.yaml"), "--store", str(folder / "runs"), "--json"]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = kvlab(command)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    there = sorted(path.name for path in folder.iterdir())
    if there != ["e.yaml", "s.yaml", "text.txt"]:
        return f"left files behind: {there}"
    text = err.getvalue()
    if code == 0:
        return None if out.getvalue().startswith("{") else "says nothing"
    if code != 2 or not text.strip() or "Traceback" in text:
        return f"exit code {code}: {text[:300]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("some text\n" * 100)
        for number in range(options.first, options.first + options.cases):
            problem = check(number, folder)
            if problem is not None:
                wrong += 1
                print(f"case {number}: {problem}", flush=True)
    print(f"{options.cases:,} mutated specs, {wrong} problems")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
