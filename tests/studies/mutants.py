"""Mutation testing: which share of random small faults in a package its tests notice.

    python -m tests.studies mutants PACKAGE [COUNT] [--seed 0] [--tests tests/cache ...]

A mutant is the package with one comparison, operator, number, boolean or `not` changed. It is
noticed where a test of the package fails or takes ten times as long. Mutants follow from the code
and the seed, so that the same ones can be tried before and after a change of the tests. Survivors
are equivalent to the code, or show where a test is missing. All happens in a copy of the tree.

The tests run once with every mutant's place marked. A mutant is then tried with the files of tests
that reach its place, and with all of them where none does or an import is enough.
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
MARKS = "KVLAB_MARKS"
MARKER = f"""
import os
seen = set()
def mark(site):
    place = site, os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[0]
    if place not in seen:
        seen.add(place)
        with open(os.environ["{MARKS}"], "a") as file:
            print(*place, sep=chr(9), file=file)
"""
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


class Marker(ast.NodeTransformer):
    """Makes code say where it is: `test` of an `if` becomes `mark(3) or test`."""

    def __init__(self, marks: dict[ast.AST, int]) -> None:
        self.marks = marks

    def visit(self, node: ast.AST) -> ast.AST:
        """Return a node, with its mark if it has one."""
        if isinstance(node, ast.pattern):  # holds no calls
            return node
        mark = self.marks.get(node)
        self.generic_visit(node)
        if mark is None:
            return node
        call = ast.parse(f"__import__('kvlab._marker')._marker.mark({mark})", mode="eval").body
        for name in ("test", "value") if isinstance(node, ast.stmt) else ():
            if isinstance(part := getattr(node, name, None), ast.expr):
                setattr(node, name, ast.BoolOp(ast.Or(), [call, part]))
                return node
        return ast.BoolOp(ast.Or(), [call, node])


def find_reaching_tests(
    tree: Path, mutants: list[tuple[Path, int]], tests: list[str]
) -> list[set[str]]:
    """Run the tests on code that says where it is; return the files of tests that reach each mutant."""
    sites: dict[Path, dict[int, int]] = {}
    for number, (path, site) in enumerate(mutants):
        sites.setdefault(path, {})[site] = number
    codes = {path: path.read_text() for path in sites}
    (tree / "kvlab" / "_marker.py").write_text(MARKER)
    for path, numbers in sites.items():
        module = ast.parse(codes[path])
        nodes = [node for node in ast.walk(module) for _ in list_changes(node)]
        marker = Marker({nodes[site]: number for site, number in numbers.items()})
        path.write_text(ast.unparse(ast.fix_missing_locations(marker.visit(module))))
    with tempfile.NamedTemporaryFile("r", prefix="marks-") as marks:
        run_tests(tree, tests, marks=marks.name)
        reached: list[set[str]] = [set() for _ in mutants]
        for line in marks:
            number, test = line.rstrip("\n").split("\t")
            reached[int(number)].add(test)
    for path, code in codes.items():
        write_module(path, code)
    return reached


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


def run_tests(
    tree: Path, tests: list[str], seconds: float | None = None, marks: str | None = None
) -> bool:
    """Return whether the tests pass in a tree, within a time; to the end if they leave marks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    command += [] if marks else ["-x"]
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), MARKS: marks or os.devnull},
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
        reached = find_reaching_tests(tree, mutants, tests)
        for (path, site), files in zip(mutants, reached, strict=True):
            code = path.read_text()
            module = ast.parse(code)
            change = mutate(module, site)
            write_module(path, ast.unparse(module))
            chosen = sorted(files, key=lambda file: (path.stem not in file, file))
            survives = run_tests(tree, tests if not files or "" in files else chosen, limit)
            write_module(path, code)
            noticed += not survives
            print(
                f"{'SURVIVES' if survives else 'noticed'} {path.relative_to(tree)}:{change}",
                flush=True,
            )
    print(f"{noticed} of {len(mutants)} mutants noticed ({noticed / len(mutants):.0%})")
    return 0
