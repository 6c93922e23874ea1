"""Kill drivers, workers and healers of one record at random, while files of it are damaged.

    python -m tests.studies kill_heal --kills 100 --seed 0

A driver runs a sweep of real trainings and measurements with two workers, each in a process of its
own, and `kvlab verify --heal` runs beside it. Now and then a bit of a finished file flips, its end
is cut off, or it is deleted. Drivers, workers and healers get SIGKILL at random moments; the
workers of a killed driver live on beside the next one. Once the kills are used up, one more
`kvlab verify --heal` and submit follow. Then the record must verify, and every number and weight
must be bitwise that of an undisturbed sweep.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch

from kvlab.cli.commands import verify
from kvlab.errors import KvlabError, WorkerKilled
from kvlab.spec import ResourcesConfig, load_sweep
from kvlab.store import Store
from kvlab.store.verification import verify_record
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors.executor import EndedTask, RunTask
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_sweep
from kvlab.trial.run import Task, run_task
from kvlab.trial.torch_trainable import TorchTrainable
from tests.studies import read_options
from tests.support.chaos_checks import numbers
from tests.support.chaos_processes import adopt_orphans
from tests.support.tiny_sweep import EXPERIMENT, write_tiny_sweep

TRAINING = EXPERIMENT.replace("tokens: 640,", "tokens: 1920, checkpoint_every: 4,")

SWEEP = """\
question: Does anything get lost?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1, training.init_from: {heads: mha}}
  serving:
    plain: {}
    tied: {serving.tie: "adjacent:2"}
seeds: [0, 1]
failures: {killed_retries: 50, backoff_seconds: 0.01}
"""

FINISHED = (
    "runs/trials/*/result.json", "runs/trials/*/trial.json", "runs/trials/*/*.gz",
    "runs/trainings/*/*.json", "runs/trainings/*/final/*.safetensors",
    "runs/trainings/*/checkpoints/step-*/*", "runs/sweeps/*/sweep.json",
    "data/datasets/[!.]*/*.*",
)  # fmt: skip
WORKERS = 2
LONGEST_PAUSE = 1.2
"""Most seconds between two kills."""

CALM = 0.3
"""Probability that the next kill waits for another result, so that the sweep gets on."""

DAMAGE = 0.5
"""Probability that a file is damaged before a kill."""

ROUND_SECONDS = 600.0

_fork = multiprocessing.get_context("fork")


class ForkingExecutor(InlineExecutor):
    """Run each task in a process of its own, `WORKERS` at once."""

    def __init__(self, run: RunTask):
        super().__init__(run)
        self._running: dict[Connection, tuple[str, BaseProcess]] = {}

    def has_room(self, resources: ResourcesConfig) -> bool:  # noqa: ARG002 (the contract's)
        return len(self._running) < WORKERS

    def start(self, task: Task) -> None:
        receiver, sender = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_run_task, args=(self._run, task, sender))
        process.start()
        sender.close()
        self._running[receiver] = task.id, process

    def wait(self, seconds: float) -> list[EndedTask]:
        return [self._end(one) for one in wait(list(self._running), seconds)]

    def _end(self, receiver: Connection) -> EndedTask:
        task_id, process = self._running.pop(receiver)
        try:
            outcome, error = receiver.recv()
        except EOFError:
            outcome, error = None, WorkerKilled("the worker was killed")
        process.join()
        return EndedTask(task_id, outcome=outcome, error=error)


def _run_task(run: RunTask, task: Task, sender: Connection) -> None:
    _name_process("worker")
    try:
        sender.send((run(task), None))
    except Exception as error:
        sender.send((None, error))


def _name_process(kind: str) -> None:
    Path("/proc/self/comm").write_text(f"kvlab-{kind}")


def drive(folder: Path) -> int:
    """Submit the sweep; return the exit code of its summary, 3 after an error."""
    _name_process("driver")
    store = Store(folder / "runs")
    try:
        planned = plan(load_sweep(folder / "s.yaml"), store)
        description = describe_sweep(planned, yaml="y", experiment_yaml="e", command="c")
        # imported before the fork
        run = partial(run_task, store=store.path, wait=False, make_trainable=TorchTrainable)
        driver = Driver(planned, store, ForkingExecutor(run), description=description)
        return driver.run().exit_code
    except KvlabError as error:
        print(f"{type(error).__name__}: {error}")
        return 3


def heal(folder: Path) -> int:
    """Run `kvlab verify --heal`."""
    _name_process("healer")
    options = argparse.Namespace(sweep=None, heal=True, json=False, store=str(folder / "runs"))
    return verify.run(options)


class Round:
    """One record, from its first submit to its check, and the kills in between."""

    def __init__(self, folder: Path, kills: int, chance: random.Random):
        self.folder, self.left, self.chance = folder, kills, chance
        self.store = Store(folder / "runs")
        self.killed: Counter[str] = Counter()
        self.damaged: Counter[str] = Counter()
        self.processes: dict[str, BaseProcess] = {}
        self.deadline = time.monotonic() + ROUND_SECONDS

    def run(self, expected: dict[str, object]) -> None:
        """Disturb the sweep until all kills are used, let it end, and check what it left.

        Raises:
            AssertionError: Something was lost, changed or deleted, or does not end.
        """
        while self.left:
            self.keep_running()
            if self.chance.random() < CALM:
                self.wait_for_a_result()
            end = time.monotonic() + self.chance.uniform(0.0, LONGEST_PAUSE)
            while time.monotonic() < end:
                time.sleep(0.01)
                self.keep_running()
            if self.chance.random() < DAMAGE:
                self.damage_a_file()
            self.kill_one()
        for kind in ("driver", "healer"):
            self.join(kind)
        while _living():
            assert time.monotonic() < self.deadline, f"{_living()} do not end"
            time.sleep(0.05)
        for kind in ("healer", "driver", "healer"):
            self.start(kind)
            code = self.join(kind)
            assert code == 0, f"the last {kind} ended with {code}:\n{self.read_log(kind)}"
        self.check(expected)

    def wait_for_a_result(self) -> None:
        """Wait until one more trial has its result, or until a submit finds none missing."""
        before, driver = self.count_results(), self.processes["driver"]
        while self.count_results() <= before and driver.is_alive():
            time.sleep(0.01)
            self.keep_running()

    def count_results(self) -> int:
        return len(list(self.store.path.glob("trials/*/result.json")))

    def keep_running(self) -> None:
        for kind in ("driver", "healer"):
            process = self.processes.get(kind)
            if process is None or not process.is_alive():
                code = None if process is None else process.exitcode
                fine = (None, 0, -signal.SIGKILL) if kind == "driver" else (None, 0, 1, -9)
                assert code in fine, f"a {kind} ended with {code}:\n{self.read_log(kind)}"
                self.start(kind)
        assert time.monotonic() < self.deadline, f"it does not end:\n{self.read_log('driver')}"

    def start(self, kind: str) -> None:
        run = drive if kind == "driver" else heal
        process = _fork.Process(target=_run_logged, args=(run, self.folder, self.log(kind)))
        process.start()
        self.processes[kind] = process

    def log(self, kind: str) -> Path:
        return self.folder / f"{kind}.txt"

    def read_log(self, kind: str) -> str:
        return self.log(kind).read_text()[-4000:]

    def join(self, kind: str) -> int | None:
        process = self.processes[kind]
        process.join(max(0.0, self.deadline - time.monotonic()))
        assert not process.is_alive(), f"the {kind} does not end:\n{self.read_log(kind)}"
        return process.exitcode

    def kill_one(self) -> None:
        found = _living()
        kinds = sorted({kind for kind, _ in found})
        if kinds:
            kind = self.chance.choice(kinds)
            victim = self.chance.choice([one for name, one in found if name == kind])
            with contextlib.suppress(psutil.Error):
                victim.kill()
                self.killed[kind] += 1
                self.left -= 1

    def damage_a_file(self) -> None:
        """Replace a file by a damaged one, or delete it. Who has it open still reads what it was."""
        groups = [sorted(self.folder.glob(pattern)) for pattern in FINISHED]
        groups = [files for files in groups if files]
        if not groups:
            return
        path = self.chance.choice(self.chance.choice(groups))
        how = self.chance.choice(["flip", "flip", "cut", "gone"])
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            if how == "gone":
                path.unlink()
            elif data:
                temporary = self.folder / "damaged"
                temporary.write_bytes(_damage(data, how, self.chance))
                os.replace(temporary, path)
            self.damaged[f"{path.name} {how}"] += 1

    def check(self, expected: dict[str, object]) -> None:
        found = verify_record(self.store)
        assert not found.damaged, found.damaged
        assert not list(self.store.path.rglob("attempts/*/traceback.txt")), "a trial failed"
        # weights that were deleted are made again when a trial needs them, and here none does
        now = numbers(self.store, self.folder, may_lack_weights=True)
        wrong = [key for key in now if now[key] != expected[key]]
        assert not wrong, f"differ from the undisturbed sweep: {wrong}"
        trials = set(self.store.sweep_trials("s"))
        assert trials <= now.keys() <= expected.keys()


def _run_logged(run: Callable[[Path], int], folder: Path, log: Path) -> None:
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.exit(run(folder))


def _living() -> list[tuple[str, psutil.Process]]:
    """Return the drivers, workers and healers that run, and what each is."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("kvlab-"):
                found.append((process.name().removeprefix("kvlab-"), process))
    return found


def _damage(data: bytes, how: str, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    if how == "cut":
        return data[:place]
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _prepare(folder: Path) -> dict[str, object]:
    """Write the sweep, run it undisturbed, and return its numbers."""
    write_tiny_sweep(folder, SWEEP, TRAINING)
    os.chdir(folder)
    os.environ["KVLAB_DATA"] = str(folder / "data")
    calm = _fork.Process(target=_run_logged, args=(drive, folder, folder / "calm.txt"))
    calm.start()
    calm.join()
    assert calm.exitcode == 0, (folder / "calm.txt").read_text()
    expected = numbers(Store(folder / "runs"), folder)
    shutil.rmtree(folder / "runs")
    return expected


def main() -> int:
    """Return 0 if all is as undisturbed, 1 after printing what is not."""
    options = read_options(__doc__, kills=100, seed=0)
    torch.set_num_threads(1)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder, began = Path(tempfile.mkdtemp(prefix="kill-heal-")), time.monotonic()
    try:
        one = Round(folder, options.kills, random.Random(options.seed))
        expected = _prepare(folder)
        print(f"{time.monotonic() - began:4.0f} s  undisturbed: {len(expected)} facts", flush=True)
        try:
            one.run(expected)
        except AssertionError as error:
            print(f"in {folder}, after {dict(one.killed)}: {error}", file=sys.stderr)
            return 1
        print(f"{time.monotonic() - began:4.0f} s  {one.killed.total()} kills {dict(one.killed)}")
        print(f"        {one.damaged.total()} files damaged: {dict(sorted(one.damaged.items()))}")
        aside = len(list(one.store.path.glob("*/*/damaged/*")))
        print(f"        {aside} moves into damaged/")
        print("        all numbers and weights as undisturbed, every file verified")
        shutil.rmtree(folder)
        return 0
    finally:
        for _, process in _living():
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
