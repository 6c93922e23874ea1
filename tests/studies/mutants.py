"""Mutation testing: which share of random small faults in a package its tests notice.

    python -m tests.studies mutants PACKAGE [COUNT] [--seed 0] [--tests tests/cache ...]

A mutant is the package with one comparison, operator, number, boolean or `not` changed. It is
noticed where a test of the package fails or takes ten times as long. Mutants follow from the code
and the seed, so that the same ones can be tried before and after a change of the tests. Survivors
are equivalent to the code, or show where a test is missing. All happens in a copy of the tree.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv),
]  # fmt: skip
SWAPS = {**dict(PAIRS), **{second: first for first, second in PAIRS}, ast.Div: ast.Mult}


def mutate(tree: ast.Module, site: int) -> str | None:
    """Change a tree at one of its sites, in place; return what was changed, None past the last."""
    for node in ast.walk(tree):
        for change in list_changes(node):
            if site == 0:
                before = ast.unparse(getattr(node, "test", node))
                for name, value in change.items():
                    setattr(node, name, value)
                after = ast.unparse(getattr(node, "test", node))
                return f"{getattr(node, 'lineno', 0)}: {before[:60]} -> {after[:60]}"
            site -= 1
    return None


def list_changes(node: ast.AST) -> Iterator[dict[str, object]]:
    """Yield the changes of a node, each by new values of its attributes."""
    match node:
        case ast.Compare(ops=[first, *others]) if type(first) in SWAPS:
            yield {"ops": [SWAPS[type(first)](), *others]}
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield {"op": SWAPS[type(op)]()}
        case ast.Constant(value=bool(value)):
            yield {"value": not value}
        case ast.Constant(value=int(value) | float(value)):
            yield {"value": value + 1}
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(
            test, ast.UnaryOp
        ):  # a `not` is a node of its own
            yield {"test": ast.UnaryOp(ast.Not(), test)}
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield {"operand": ast.UnaryOp(ast.Not(), operand)}


def write_module(path: Path, code: str) -> None:
    """Write a module, and forget how it was compiled: its size and second may be those of before."""
    path.write_text(code)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def draw_mutants(package: Path, count: int, seed: int) -> list[tuple[Path, int]]:
    """Return modules and sites in them, drawn without replacement."""
    sites = [
        (path, site)
        for path in sorted(package.rglob("*.py"))
        for site in range(
            sum(1 for node in ast.walk(ast.parse(path.read_text())) for _ in list_changes(node))
        )
    ]
    return random.Random(seed).sample(sites, min(count, len(sites)))


def run_tests(tree: Path, tests: list[str], seconds: float | None = None) -> bool:
    """Return whether the tests pass in a tree, within a time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what tests started and left


def main() -> int:
    """Try the mutants, print each and the share that is noticed; return 2 if tests fail without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="a folder of kvlab/, such as cache or model/kernels")
    parser.add_argument("count", nargs="?", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="by default the package's own")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every `finally`
    tests = options.tests or [f"tests/{options.package}"]
    with tempfile.TemporaryDirectory() as name:
        tree, noticed = Path(name), 0
        for entry in ROOT.iterdir():
            if entry.name in ("kvlab", "tests"):
                shutil.copytree(entry, tree / entry.name)
            elif entry.name != ".git":
                (tree / entry.name).symlink_to(entry)
        mutants = draw_mutants(tree / "kvlab" / options.package, options.count, options.seed)
        start = time.perf_counter()
        if not run_tests(tree, tests):
            print(f"{' '.join(tests)} fail without any mutant", file=sys.stderr)
            return 2
        limit = 30 + 10 * (time.perf_counter() - start)
        for path, site in mutants:
            code = path.read_text()
            module = ast.parse(code)
            change = mutate(module, site)
            write_module(path, ast.unparse(module))
            # the file of the module's own name first: it notices most
            first = sorted(tree.glob(f"tests/**/test_{path.stem}.py"))
            survives = run_tests(tree, [*map(str, first), *tests], limit)
            write_module(path, code)
            noticed += not survives
            print(
                f"{'SURVIVES' if survives else 'noticed'} {path.relative_to(tree)}:{change}",
                flush=True,
            )
    print(f"{noticed} of {len(mutants)} mutants noticed ({noticed / len(mutants):.0%})")
    return 0
