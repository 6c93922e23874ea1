"""What a newcomer does, exactly as `docs/first-hour.md` and `docs/your-question.md` write it.

    python -m tests.newcomer

The commands of a page run one after the other with an empty home: those of the first in an empty
folder, those of the second beside this project's experiments, with the sweeps that the page writes.
Each must exit with 0, print and write what matters, and is listed with its seconds. The trainings of
the second page are those of the quickstart, and come from its committed record. The sweep that
`kvlab init` writes has two of its four seeds here: `make demo` trains at four. Everything that was
started is stopped at the end.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first-hour.md"
TUTORIAL = ROOT / "docs" / "your-question.md"
RECORD = ROOT / "reports" / "quickstart" / "record.tar.xz"
PAGE_ID = "51c0ffee"
MARK = "KVLAB_NEWCOMER"
"""Environment variable by which the processes of this run are found."""

LONGEST = {"submit": 1800}
SECONDS = 300
"""Limits of one command, on a machine that does other things too."""


class Failure(Exception):
    """A command of the page does not do what the page says."""


class Step(NamedTuple):
    """Patterns that a command's output must match, and files that it must write."""

    prints: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


FIRST, SEEDS = "my-ablations/sweeps/first.yaml", ("seeds: [0, 1, 2, 3]", "seeds: [0, 1]")
"""The sweep that `kvlab init` writes; what of it is shortened."""

FIRST_DONE = r"(?m)^done +([0-9a-f]{8}) heads=mha sharing=none seed=0 "
"""The line of the baseline. Before its text is prepared a plan cannot know the ids of trials."""

STEPS = {
    "init": Step((r"next: cd my-ablations",), (FIRST,)),
    "plan": Step((r"(?m)^mha +none +0 +[0-9a-f]{8} ", r"Still to run: \d+ trials")),
    "submit": Step(
        (r"\d+ done, 0 failed", FIRST_DONE),
        ("reports/first/report.html", "reports/first/report.md", "reports/first/results.csv"),
    ),
    "status": Step((r"(?m)^first +\d+( +0){5} +no$",)),
    "report": Step((r"reports/first",), ("reports/first/report.html",)),
    "paper": Step(
        (r"(?m)^paper/first: .*ablation\.tex",), ("paper/main.tex", "paper/first/ablation.tex")
    ),
    "generate": Step((r"(?m)^A cache is",)),
    "export": Step((r"my-model",), ("my-model/config.json", "my-model/model.safetensors")),
    "ui": Step(),
}
"""Command -> what must hold after it; every command of the page has an entry."""

TUTORIAL_STEPS = {
    "plan": Step((r"\d+ trials, \d+ trainings",)),
    "submit": Step(
        (r"12 done, 0 failed", r"reports/one-head/report\.html$"),
        ("reports/one-head/report.html", "reports/one-head/report.md"),
    ),
    "explain": Step((r"(?m)^mean over 4 seeds = ",)),
}


def main() -> int:
    """Run the page; return 1 if a command fails."""
    try:
        follow(PAGE, STEPS)
        follow(TUTORIAL, TUTORIAL_STEPS, record=RECORD)
    except Failure as failure:
        print(failure)
        return 1
    return 0


def follow(page: Path, steps: dict[str, Step], record: Path | None = None) -> None:
    """Run the commands of a page, after restoring a record and writing the sweeps that it names."""
    text = page.read_text()
    commands = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    used = {words[1] for words in map(shlex.split, commands) if words[0] == "kvlab"}
    if differing := steps.keys() ^ used:
        raise Failure(f"{page.name} and its steps differ: {', '.join(sorted(differing))}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as home, stopped_at_the_end() as environment:
        newcomer = Newcomer(Path(home), environment, steps)
        if record is not None:
            newcomer.restore(record)
        for name, block in re.findall(r"```yaml\n# (sweeps/\S+)\n(.*?)```", text, re.DOTALL):
            newcomer.write(name, block)
        for command in commands:
            newcomer.run(command)
    print(f"{time.monotonic() - start:6.1f} s  {page.name}")


class Newcomer:
    """A person at a terminal: a folder, an environment and what was printed so far."""

    def __init__(self, home: Path, environment: dict[str, str], steps: dict[str, Step]):
        self.folder = home / "work"
        self.folder.mkdir()
        self._environment = {**environment, "HOME": str(home)}
        self._steps = steps
        self._first_trial = ""

    def write(self, name: str, text: str) -> None:
        """Write a sweep beside the experiments of this project."""
        if not (self.folder / "experiments").exists():
            shutil.copytree(ROOT / "experiments", self.folder / "experiments")
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def restore(self, record: Path) -> None:
        """Restore a record, so that the page's sweeps have nothing to train."""
        self._finish(["kvlab", "copy", "--from", str(record)])

    def run(self, command: str) -> None:
        """Run one line of the page, as a shell would."""
        words = shlex.split(command)
        if words[0] == "cd":
            self.folder /= words[1]
        if words[0] != "kvlab":
            return  # the set-up, by which this runs
        name = words[1]
        words = [self._first_trial if word == PAGE_ID else word for word in words]
        start = time.monotonic()
        text = self._serve(words) if name == "ui" else self._finish(words)
        seconds = time.monotonic() - start
        for pattern in self._steps[name].prints:
            if not re.search(pattern, text):
                raise Failure(f"$ {command}\n{text}\nno line matches {pattern}")
        for path in self._steps[name].writes:
            if not (self.folder / path).is_file() or not (self.folder / path).stat().st_size:
                raise Failure(f"$ {command}\n{text}\n{path} was not written")
        if name == "init":
            sweep = self.folder / FIRST
            if SEEDS[0] not in sweep.read_text():
                raise Failure(f"{FIRST} does not have {SEEDS[0]}")
            sweep.write_text(sweep.read_text().replace(*SEEDS))
        if found := re.search(FIRST_DONE, text):
            self._first_trial = found[1]
        print(f"{seconds:6.1f} s  $ {command}", flush=True)

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words, cwd=self.folder, env=self._environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _finish(self, words: list[str]) -> str:
        process = self._start(words)
        try:
            text, _ = process.communicate(timeout=LONGEST.get(words[1], SECONDS))
        except subprocess.TimeoutExpired:
            raise Failure(f"$ {shlex.join(words)}\ndoes not end") from None
        if process.returncode:
            raise Failure(f"$ {shlex.join(words)}\n{text}\nexits with {process.returncode}")
        return text

    def _serve(self, words: list[str]) -> str:
        """Start the pages of MLflow, load them, and stop the server as Ctrl-C does."""
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", 5000)) == 0:  # somebody else's
                words = [*words, "--port", "5057"]
        process = self._start(words)
        assert process.stdout is not None, "it is a pipe"
        printed = ""
        for line in process.stdout:
            printed += line
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise Failure(f"$ {shlex.join(words)}\n{printed}\nno address is printed")
        search = f"{address[0]}/ajax-api/2.0/mlflow/experiments/search?max_results=100"
        found = wait_for_page(search)
        names = {one["name"] for one in json.loads(found).get("experiments", [])}
        if not any("first" in name for name in names):
            raise Failure(f"MLflow shows {', '.join(sorted(names))}, and no sweep first")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        if process.returncode not in (0, 130):
            raise Failure(f"$ {shlex.join(words)}\nexits with {process.returncode} after Ctrl-C")
        return printed


@contextmanager
def stopped_at_the_end() -> Iterator[dict[str, str]]:
    """Yield an environment without kvlab's settings, and end every process that still has it."""
    mark = uuid.uuid4().hex
    kept = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment |= {MARK: mark, "PYTHONUNBUFFERED": "1"}
    try:
        yield environment
    finally:
        left = [process for process in psutil.process_iter() if _get_mark(process) == mark]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=30)


def wait_for_page(address: str) -> str:
    """Return a page of the server on this machine once it answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(OSError), opener.open(address, timeout=10) as response:
            text: str = response.read().decode()
            return text
        time.sleep(0.2)
    raise Failure(f"waited {SECONDS} s for {address} to answer")


def _get_mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None


if __name__ == "__main__":
    sys.exit(main())
