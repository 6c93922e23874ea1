"""Kill processes at random under sweeps of real trainings, and check that nothing is lost.

    python -m tests.studies chaos --kills 100 --seed 0

Rounds alternate between a Ray cluster of two nodes (``submit --address``) and the cluster that
``submit`` starts itself. Each round is a sweep in its own store. Drivers, workers, raylets, a GCS and
whole nodes get SIGKILL, in a seeded order at random moments. A killed driver is followed by another
``submit``, and a killed node is replaced. At the end of a round, every trial must have ended
exactly once, its numbers and weights must equal those of an undisturbed sweep bitwise, MLflow must
hold what a sync would write, and no process may be left. After the last kill, the sweep of that
round runs to its end.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from kvlab.store import Store
from tests.studies import read_options
from tests.support.chaos_checks import Watch, check_mlflow, check_record, numbers
from tests.support.chaos_processes import (
    TwoNodes,
    adopt_orphans,
    bury,
    family,
    kill,
    lives,
    set_environment,
    submit,
    title,
    trial_workers,
)
from tests.support.tiny_sweep import EXPERIMENT, write_tiny_sweep

SWEEP = """\
question: Does anything get lost?
experiment: e.yaml
factors:
  form:
    separate: {{}}
    half: {{model.kv: half_values}}
  serving:
    plain: {{}}
    tied: {{serving.tie: "adjacent:2"}}
seeds: {seeds}
failures: {{killed_retries: 50, backoff_seconds: 0.1}}
"""

OWN_FORM = Path(__file__).parents[2] / "docs" / "extend" / "half_values.py"
"""A user's file, which workers have from the driver."""

KINDS = {
    "two nodes": ("driver", "worker", "raylet", "node"),
    "own cluster": ("driver", "worker", "driver", "raylet", "gcs_server"),
}
LONGEST_PAUSE = 2.5
"""Most seconds between a trial being seen to run and the next kill."""

CALM = 0.4
"""Probability that the next kill waits for another trial to end, so that sweeps progress."""

ROUND_SECONDS = 1800.0
GONE_SECONDS = 60.0
POLL_SECONDS = 0.05


class Round:
    """One sweep, from its first `submit` to its end, and the kills in between."""

    def __init__(self, home: "Home", where: str, budget: int, chance: random.Random):
        self.home, self.where, self.chance = home, where, chance
        self.left = budget
        self.killed: Counter[str] = Counter()
        self.drivers = 0
        self.place = Path(tempfile.mkdtemp(prefix="round-", dir=home.folder))
        self.log = self.place / "log.txt"
        self.store = Store(self.place / "runs")
        self.watch = Watch(self.store)
        self.cluster = TwoNodes() if where == "two nodes" else None
        self.driver: subprocess.Popen[bytes] | None = None
        self.deadline = time.monotonic() + ROUND_SECONDS

    def run(self) -> None:
        """Run until the sweep is finished.

        Raises:
            AssertionError: Something was lost, done twice, or left behind.
        """
        try:
            deck: list[str] = []
            while not self.finished():
                if self.left:
                    deck = deck or self.chance.sample(KINDS[self.where], len(KINDS[self.where]))
                    self.strike(deck.pop())
                else:
                    self.tick()
            check_record(self.store, self.home.folder, self.home.expected)
        finally:
            self.close()
        check_mlflow(self.store, self.place)

    def finished(self) -> bool:
        """Start a driver if none runs; return True once one has found everything done."""
        self.tick()
        if self.driver is not None and self.driver.poll() is None:
            return False
        if self.driver is not None and self.driver.returncode == 0:
            return True
        if self.driver is not None and self.driver.returncode != -9:
            said = self.log.read_text()[-5000:]
            raise AssertionError(f"a driver ended with {self.driver.returncode}:\n{said}")
        address = [] if self.cluster is None else ["--address", self.cluster.address]
        self.log.write_text("")
        self.driver = submit(self.home.folder, self.store.path, self.log, *address)
        self.drivers += 1
        return False

    def tick(self) -> None:
        time.sleep(POLL_SECONDS)
        self.watch.look()
        bury(self.ours())
        assert time.monotonic() < self.deadline, f"stuck:\n{self.log.read_text()[-3000:]}"

    def ours(self) -> set[int]:
        """Return the processes whose exit codes are read by others."""
        pids = self.cluster.pids() if self.cluster else set()
        return pids | ({self.driver.pid} if self.driver else set())

    def strike(self, kind: str) -> None:
        """Wait for a random time, then kill a process of this kind if there is one."""
        assert self.driver is not None, "started by `finished`"
        if kind != "driver" or self.chance.random() < 0.7:  # the others while it starts
            self.wait_for(lambda: bool(trial_workers()))
        if self.chance.random() < CALM:
            before = self.watch.look()
            self.wait_for(lambda: self.watch.look() > before)
        end = time.monotonic() + self.chance.uniform(0.0, LONGEST_PAUSE)
        self.wait_for(lambda: time.monotonic() >= end)
        if self.driver.poll() is not None:
            return
        hit = kill(*self.victims(kind))
        if hit:
            self.left -= 1
            self.killed[kind] += 1
            self.home.say(f"{self.where}: killed {kind}, {self.watch.look()} trials done")
        if kind == "driver":
            self.driver.wait()
        elif self.cluster is not None and kind in ("raylet", "node"):
            end = time.monotonic() + self.chance.uniform(0.0, LONGEST_PAUSE)
            while time.monotonic() < end:
                self.tick()
            self.cluster.replace_second_node()

    def victims(self, kind: str) -> list[psutil.Process]:
        assert self.driver is not None, "started by `finished`"
        if kind == "driver":
            return [psutil.Process(self.driver.pid)]
        if kind == "worker":
            return self.chance.sample(found, 1) if (found := trial_workers()) else []
        if self.cluster is not None:
            return self.cluster.raylet() if kind == "raylet" else self.cluster.second_node()
        return [one for one in family(self.driver.pid) if one.name() == kind]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or the driver has ended."""
        assert self.driver is not None, "started by `finished`"
        while not condition() and self.driver.poll() is None:
            self.tick()

    def close(self) -> None:
        """End what the round has started, and check that nothing else is left."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        if self.cluster is not None:
            self.cluster.close()
        end = time.monotonic() + GONE_SECONDS
        while (left := [one for one in family() if lives(one)]) and time.monotonic() < end:
            bury(set())
            time.sleep(POLL_SECONDS)
        names = [title(one)[:200] for one in left]
        kill(*left)
        assert not names, f"left behind: {names}"


class Home:
    """What all rounds share: the sweep, the numbers of an undisturbed run, the clock."""

    def __init__(self, folder: Path, kills: int, seeds: int, steps: int):
        self.folder, self.kills = folder, kills
        self.done = 0
        self._began = time.monotonic()
        training = f"tokens: {64 * steps}, checkpoint_every: 7,"
        experiment = EXPERIMENT.replace("tokens: 640,", training).replace(", retime: never", "")
        experiment = f"extensions: [{OWN_FORM.name}]\n{experiment}"
        shutil.copy(OWN_FORM, folder)
        write_tiny_sweep(folder, SWEEP.format(seeds=list(range(seeds))), experiment)
        calm = Store(folder / "calm")
        log = folder / "calm.txt"
        process = submit(folder, calm.path, log, "--executor", "inline")
        assert process.wait() == 0, log.read_text()
        self.expected = numbers(calm, folder)
        self.say(f"undisturbed: {len(calm.trial_ids())} trials done")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)


def main() -> int:
    """Run rounds until all kills are used; return 0, or 1 after printing what went wrong."""
    options = read_options(
        __doc__, kills=100, seed=0, seeds=3, steps=600, where=("two nodes", "own cluster")
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every `finally`
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if _rounds(folder, options):
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _rounds(folder: Path, options: argparse.Namespace) -> int:
    adopt_orphans()
    set_environment(folder)
    home = Home(folder, options.kills, options.seeds, options.steps)
    chance, killed, drivers = random.Random(options.seed), Counter[str](), 0
    left, number, trials = options.kills, 0, 0
    while left > 0:
        one = Round(home, options.where[number % len(options.where)], left, chance)
        try:
            one.run()
        except AssertionError as error:
            print(f"round {number} ({one.where}, in {one.place}): {error}", file=sys.stderr)
            return 1
        number, left, drivers = number + 1, one.left, drivers + one.drivers
        trials += len(one.store.trial_ids())
        killed += one.killed
        home.say(f"round {number}, {one.where}: all as undisturbed; {dict(one.killed)}")
        shutil.rmtree(one.place, ignore_errors=True)
    home.say(f"{killed.total()} kills {dict(killed)}, {drivers} drivers, {number} rounds")
    home.say(f"{trials} trials, each finished once; no orphan, no run left running")
    return 0
