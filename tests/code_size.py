"""Compare the code lines of every package of kvlab with the table in pyproject.toml.

    python -m tests.code_size

A code line has a token that is neither a comment nor a docstring. `make check` fails where a package
has more lines than `[tool.kvlab.code-lines]` allows, or where the table allows more than it has.
"""

import ast
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SLACK = 25
"""Lines that a package may have below its number, so that a small deletion needs no new table."""

_LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
)  # fmt: skip


def count_code_lines(path: Path) -> int:
    """Return the lines of a module that are neither blank nor comments nor docstrings."""
    with path.open("rb") as file:
        tokens = [one for one in tokenize.tokenize(file.readline) if one.type not in _LAYOUT]
    lines = {line for one in tokens for line in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:  # a string that stands alone is a docstring, of an attribute too
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    """Print the packages whose size is not that of the table; return 1 if there is one."""
    found: Counter[str] = Counter()
    for path in (ROOT / "kvlab").rglob("*.py"):
        parts = path.relative_to(ROOT / "kvlab").parts
        found[parts[0] if len(parts) > 1 else "modules"] += count_code_lines(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    table = project["tool"]["kvlab"]["code-lines"]
    problems = [
        f"kvlab/{name}: {found[name]:,} code lines, and pyproject.toml says {table.get(name, 0):,}"
        for name in sorted(found.keys() | table.keys())
        if not table.get(name, 0) - SLACK <= found[name] <= table.get(name, 0)
    ]
    for problem in problems:
        print(f"{problem}; write the number that was reached, and why beside it if it is larger")
    print(f"kvlab has {found.total():,} code lines: {len(problems)} packages differ from the table")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
