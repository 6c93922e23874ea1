"""What `make check` checks beyond lint and types: schemas, specs, and what the pages say.

    python -m tests.checks

Every YAML in experiments/ and sweeps/ plans; the schemas beside them are current; in every
Markdown page links lead somewhere, and commands in ```console blocks exist. Commands that are
quick and always print the same are run, and the page must show exactly what they print.
"""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from kvlab.cli.main import main as kvlab
from kvlab.errors import KvlabError
from kvlab.spec import load_experiment, load_sweep
from kvlab.spec.json_schema import json_schema

ROOT = Path(__file__).parent.parent
SAME_EVERY_TIME = ("kvlab estimate ",)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def main() -> int:
    """Prints every problem; returns 1 if there is one."""
    problems = [*_specs(), *_schemas(), *_pages()]
    for problem in problems:
        print(problem)
    print(f"specs, schemas and pages: {len(problems)} problems")
    return int(bool(problems))


def _specs() -> Iterator[str]:
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        try:
            load_experiment(path)
        except KvlabError as error:
            yield str(error)
    for path in sorted((ROOT / "sweeps").glob("*.yaml")):
        try:
            load_sweep(path)
        except KvlabError as error:
            yield str(error)
            continue
        with redirect_stdout(io.StringIO()):
            code = kvlab(["plan", str(path), "--json"])
        if code:
            yield f"{path}: `kvlab plan` exits with {code}"


def _schemas() -> Iterator[str]:
    for kind in ("experiment", "sweep"):
        path = ROOT / f"{kind}s" / f"{kind}.schema.json"
        if json.loads(path.read_text()) != json_schema(kind):
            yield f"{path}: is not current; run `kvlab schema {kind} > {kind}s/{path.name}`"


def _pages() -> Iterator[str]:
    names = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in names.stdout.split():
        page = ROOT / name
        text = page.read_text()
        for target in LINK.findall(text):
            if (
                not re.match(r"[a-z]+:|#", target)
                and not (page.parent / target.split("#")[0]).exists()
            ):
                yield f"{name}: the link {target} leads nowhere"
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            yield from _session(name, block)


def _session(name: str, block: str) -> Iterator[str]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            if words[1] not in rules:
                yield f"{name}: make {words[1]} is not a target"
        elif words[0] == "kvlab" and command.startswith(SAME_EVERY_TIME):
            printed = io.StringIO()
            with redirect_stdout(printed):
                kvlab(words[1:])
            if shown.strip() and printed.getvalue().strip() != shown.strip():
                yield f"{name}: `{command}` prints\n{printed.getvalue()}not\n{shown}"
        elif words[0] == "kvlab":
            yield from _command(name, words)


def _command(name: str, words: list[str]) -> Iterator[str]:
    """The command's own parser must take these words."""
    from kvlab.cli.main import build_parser

    try:
        build_parser(words[1:]).parse_args(words[1:])
    except SystemExit as stop:
        if stop.code:
            yield f"{name}: `{shlex.join(words)}` is not a valid command"


if __name__ == "__main__":
    sys.exit(main())
