"""Kill drivers and healers of one record at random, while files of it are damaged.

    python -m tests.studies kill_heal --kills 100 --seed 0

Two drivers share a sweep of real trainings and measurements, and `kvlab verify --heal` runs beside
them, each in a process of its own. Now and then a bit of a finished file flips, its end is cut off,
or it is deleted. A process gets SIGKILL at a random moment, and another one takes its place. Once
the kills are used up, one more `kvlab verify --heal` and submit follow. Then the record must
verify, and every number and weight must be bitwise that of an undisturbed sweep.
"""

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
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from kvlab.cli.main import main as kvlab
from kvlab.errors import KvlabError
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.store.verification import verify_record
from kvlab.sweep import plan
from kvlab.sweep.planning.planner import describe_sweep
from kvlab.trial.run import run_task
from kvlab.trial.torch_trainable import TorchTrainable
from tests.studies import read_options
from tests.support.chaos_checks import numbers
from tests.support.stub_trials import drive
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

LONGEST_PAUSE, ROUND_SECONDS = 1.2, 600.0
"""Most seconds between two kills, and until all has to end."""

CALM, DAMAGE = 0.3, 0.5
"""Probability that the next kill waits for another result, so that the sweep gets on, and that a
file is damaged before it."""


def submit(folder: Path) -> int:
    """Run the sweep; return the exit code of its summary, 3 after an error."""
    store = Store(folder / "runs")
    try:
        planned = plan(load_sweep(folder / "s.yaml"), store)
        description = describe_sweep(planned, yaml="y", experiment_yaml="e", command="c")
        run = partial(run_task, store=store.path, wait=False, make_trainable=TorchTrainable)
        return drive(planned, store, run, description=description).exit_code
    except KvlabError as error:
        print(f"{type(error).__name__}: {error}")
        return 3


def heal(folder: Path) -> int:
    return kvlab(["verify", "--heal", "--store", str(folder / "runs")])


KINDS = {"driver": submit, "second driver": submit, "healer": heal}


class Round:
    """One record, from its first submit to its check, and the kills in between."""

    def __init__(self, folder: Path, kills: int, chance: random.Random):
        self.folder, self.kills, self.chance = folder, kills, chance
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
        while self.killed.total() < self.kills:
            results = partial(self.store.path.glob, "trials/*/result.json")
            before, calm = len([*results()]), self.chance.random() < CALM
            end = time.monotonic() + self.chance.uniform(0.0, LONGEST_PAUSE)
            while time.monotonic() < end or (calm and len([*results()]) <= before):
                time.sleep(0.01)
                self.keep_running()
                calm = calm and self.processes["driver"].is_alive()
            if self.chance.random() < DAMAGE:
                self.damage_a_file()
            kind = self.chance.choice(list(KINDS))
            if self.processes[kind].is_alive():
                self.processes[kind].kill()
                self.killed[kind] += 1
        for kind in KINDS:
            self.join(kind)
        for kind in ("healer", "driver", "healer"):
            self.start(kind)
            code = self.join(kind)
            assert code == 0, f"the last {kind} ended with {code}:\n{self.read_log(kind)}"
        self.check(expected)

    def keep_running(self) -> None:
        for kind in KINDS:
            process = self.processes.get(kind)
            if process is None or not process.is_alive():
                code = None if process is None else process.exitcode
                # a driver may be refused while another runs a sweep whose description is damaged
                fine = (None, 0, 1 if kind == "healer" else 3, -signal.SIGKILL)
                assert code in fine, f"a {kind} ended with {code}:\n{self.read_log(kind)}"
                self.start(kind)
        assert time.monotonic() < self.deadline, f"it does not end:\n{self.read_log('driver')}"

    def start(self, kind: str) -> None:
        fork = multiprocessing.get_context("fork")
        self.processes[kind] = fork.Process(target=self._run_logged, args=(kind,))
        self.processes[kind].start()

    def _run_logged(self, kind: str) -> None:
        with open(self.folder / f"{kind}.txt", "w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        sys.exit(KINDS[kind](self.folder))

    def read_log(self, kind: str) -> str:
        return (self.folder / f"{kind}.txt").read_text()[-4000:]

    def join(self, kind: str) -> int | None:
        process = self.processes[kind]
        process.join(max(0.0, self.deadline - time.monotonic()))
        assert not process.is_alive(), f"the {kind} does not end:\n{self.read_log(kind)}"
        return process.exitcode

    def damage_a_file(self) -> None:
        """Replace a file by a damaged one, or delete it. Who has it open still reads what it was."""
        groups = [sorted(self.folder.glob(pattern)) for pattern in FINISHED]
        groups = [files for files in groups if files]
        if not groups:
            return
        path = self.chance.choice(self.chance.choice(groups))
        how = self.chance.choice(["flip", "flip", "cut", "gone"])
        with contextlib.suppress(FileNotFoundError):
            data = bytearray(path.read_bytes())
            if how == "gone" or not data:
                path.unlink()
            else:
                place = self.chance.randrange(len(data))
                data[place] ^= 1 << self.chance.randrange(8)
                temporary = self.folder / "damaged"
                temporary.write_bytes(data[:place] if how == "cut" else data)
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


def main() -> int:
    """Return 0 if all is as undisturbed, 1 after printing what is not."""
    options = read_options(__doc__, kills=100, seed=0)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder, began = Path(tempfile.mkdtemp(prefix="kill-heal-")), time.monotonic()
    write_tiny_sweep(folder, SWEEP, TRAINING)
    os.chdir(folder)
    os.environ["KVLAB_DATA"] = str(folder / "data")
    one = Round(folder, options.kills, random.Random(options.seed))
    try:
        one.start("driver")
        assert one.join("driver") == 0, one.read_log("driver")
        expected = numbers(one.store, folder)
        shutil.rmtree(one.store.path)
        print(f"{time.monotonic() - began:4.0f} s  undisturbed: {len(expected)} facts", flush=True)
        one.run(expected)
    except AssertionError as error:
        print(f"in {folder}, after {dict(one.killed)}: {error}", file=sys.stderr)
        return 1
    finally:
        for process in one.processes.values():
            process.kill()
    print(f"{time.monotonic() - began:4.0f} s  {one.killed.total()} kills {dict(one.killed)}")
    print(f"        {one.damaged.total()} files damaged: {dict(sorted(one.damaged.items()))}")
    print(f"        {len(list(one.store.path.glob('*/*/damaged/*')))} moves into damaged/")
    print("        all numbers and weights as undisturbed, every file verified")
    shutil.rmtree(folder)
    return 0
