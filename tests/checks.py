"""Check specs, schemas and Markdown pages, as `make check` does after lint and types.

    python -m tests.checks

Every YAML in experiments/ and sweeps/ plans. The schemas beside them are current. In every Markdown
page the links, their headings and the modules exist, and the commands in ```console blocks parse.
Commands that are quick and deterministic are run, and the page must show their output, with a line
... for what it leaves out; of plans, lines of it. A plan may be of a sweep that the page itself
writes, in a ```yaml block that begins with its path. What a page quotes from a report is in that
report, and the findings are what the records say. Where an extension is deleted, what names it is no
problem: a link to its folder, or a YAML or a command that is refused for want of it.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlab.cli.main import build_parser
from kvlab.cli.main import main as kvlab
from kvlab.errors import KvlabError
from kvlab.own_extensions import find_members
from kvlab.spec import load_experiment, load_sweep
from tests.support.extensions import find_missing

ROOT = Path(__file__).parent.parent
DETERMINISTIC = ("kvlab estimate ",)
QUOTE = re.compile(r"\(([^)\s]*report\.md)\)(?:(?!\n\n).)*\n\n((?:>[^\n]*\n)+)", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def main() -> int:
    """Print every problem and return 1 if there is one."""
    problems = [*_check_specs(), *_check_schemas(), *_check_pages(), *_check_findings()]
    if deleted := find_missing("all"):
        named = re.compile(rf"extensions/({'|'.join(deleted)})\b")
        problems = [problem for problem in problems if not named.search(problem)]
    for problem in problems:
        print(problem)
    print(f"specs, schemas and pages: {len(problems)} problems")
    return int(bool(problems))


def _check_specs() -> Iterator[str]:
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        try:
            load_experiment(path)
        except KvlabError as error:
            yield str(error)
    for path in sorted((ROOT / "sweeps").glob("*.yaml")):
        try:
            scales = ["", *load_sweep(path).scales]
        except KvlabError as error:
            yield str(error)
            continue
        for scale in scales:
            yield from _check_sweep(path, scale)


def _check_sweep(path: Path, scale: str) -> Iterator[str]:
    """Yield why a sweep does not plan at one of its scales, or at the file's own."""
    try:
        sweep = load_sweep(path, scale)
    except KvlabError as error:
        yield str(error)
        return
    experiments = [cell.experiment for cell in sweep.cells()]
    paths = {path for one in experiments for path in one.data.paths}
    weights = [one.training.init_from for one in experiments]
    paths |= {path for path in weights if isinstance(path, str) and os.path.isabs(path)}
    if not all(map(os.path.exists, paths)):
        return  # text or weights that a person brings
    with redirect_stdout(io.StringIO()):
        code = kvlab(["plan", str(path), "--scale", scale, "--json", "--rate", "1e12"])
    if code:
        yield f"{path}: `kvlab plan --scale {scale}` exits with {code}"


def _check_schemas() -> Iterator[str]:
    for kind in ("experiment", "sweep"):
        path = ROOT / f"{kind}s" / f"{kind}.schema.json"
        current = [make(kind) for make in find_members("schemas").values()]
        if current and json.loads(path.read_text()) != current[0]:
            yield f"{path}: is not current; run `kvlab schema {kind} > {kind}s/{path.name}`"


def _check_pages() -> Iterator[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    modules = {Path(name).name for name in listed}
    for name in (name for name in listed if name.endswith(".md")):
        page = ROOT / name
        text = page.read_text()
        if re.search("^(<{7}|>{7}) ", text, re.MULTILINE):
            yield f"{name}: has the marks of a merge"
        for module in set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text)) - modules:
            yield f"{name}: there is no {module}"
        for target in LINK.findall(text):
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            if not re.match(r"[a-z]+:", target) and (
                not found.exists() or (anchor and anchor not in _list_anchors(found))
            ):
                yield f"{name}: the link {target} leads to {found}, where nothing is"
        yield from _check_quotes(name, page, text)
        written = dict(re.findall(r"```yaml\n# (sweeps/\S+)\n(.*?)```", text, re.DOTALL))
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            yield from _check_session(name, block, written)


def _list_anchors(page: Path) -> set[str]:
    """Return the names by which a page's headings are linked."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _check_quotes(name: str, page: Path, text: str) -> Iterator[str]:
    """Yield every quoted line that is not in the report that is named just before it."""
    for target, quote in QUOTE.findall(text):
        report = (page.parent / target).read_text().splitlines()
        for line in (line.removeprefix(">").strip() for line in quote.splitlines()):
            if line and line not in report:
                yield f"{name}: quotes what {target} does not say: {line}"


def _check_findings() -> Iterator[str]:
    """Yield every page of `kvlab findings` that is not what the records say."""
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        code = kvlab(["findings", "--check", "--reports", str(ROOT / "reports")])
    if code == 1:
        yield from printed.getvalue().splitlines()
    elif code:
        yield f"reports/claims.yaml: {errors.getvalue()}"


def _check_session(name: str, block: str, written: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with the commands of a block.

    Args:
        written: Sweeps that the page writes, by their path in a project.
    """
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            if words[1] not in rules:
                yield f"{name}: make {words[1]} is not a target"
        elif words[0] == "kvlab" and command.startswith(DETERMINISTIC):
            printed, refused = _run(words[1:])
            pattern = re.escape(expected.strip()).replace(re.escape("\n...\n"), "\n(.*\n)*?")
            if expected.strip() and not re.fullmatch(pattern, printed.strip()):
                yield f"{name}: `{command}` prints\n{printed}{refused}not\n{expected}"
        elif words[:2] == ["kvlab", "plan"] and (ROOT / words[-1]).is_file():
            yield from _check_plan(name, words, ROOT / words[-1], expected)
        elif words[:2] == ["kvlab", "plan"] and words[-1] in written:
            with TemporaryDirectory() as folder:
                sweep = Path(folder, words[-1])
                sweep.parent.mkdir()
                sweep.write_text(written[words[-1]])
                for beside in ("experiments", "reports"):
                    Path(folder, beside).symlink_to(ROOT / beside)
                yield from _check_plan(name, words, sweep, expected)
        elif words[0] == "kvlab":
            yield from _check_command(name, words)


def _check_plan(name: str, words: list[str], sweep: Path, expected: str) -> Iterator[str]:
    """Yield every line that the plan does not print."""
    with TemporaryDirectory() as store:
        printed, refused = _run([*words[1:-1], str(sweep), "--store", store])
    lines = set(_hide_what_differs(printed).splitlines())
    for line in _hide_what_differs(expected).strip().splitlines():
        if line not in lines and line != "...":
            yield f"{name}: `{shlex.join(words)}` does not print: {line}\n{refused}"


def _run(words: list[str]) -> tuple[str, str]:
    """Return what a command of kvlab prints, and why it is refused."""
    printed, refused = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(refused):
        kvlab(words)
    return printed.getvalue(), refused.getvalue()


def _hide_what_differs(text: str) -> str:
    """Hide ids, which follow from the text of this machine, and its time, memory and cores."""
    text = re.sub(r"^(Time|Predicted peak|Timings).*", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"\b[0-9a-f]{8}\b", "<id>", text)


def _check_command(name: str, words: list[str]) -> Iterator[str]:
    """Parse the words with the command's own parser."""
    refused = io.StringIO()
    try:
        with redirect_stderr(refused):
            build_parser(words[1:]).parse_args(words[1:])
    except SystemExit as stop:
        if stop.code:
            yield f"{name}: `{shlex.join(words)}` is not a valid command\n{refused.getvalue()}"


if __name__ == "__main__":
    sys.exit(main())
