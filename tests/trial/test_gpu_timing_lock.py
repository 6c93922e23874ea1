"""The timing lock of a shared device, with real processes and real locks."""

import subprocess
import sys

import pytest

from kvlab.trial.gpu_timing_lock import TimingLock

WORKER = """
import sys
from pathlib import Path
from kvlab.trial.gpu_timing_lock import TimingLock
lock = TimingLock("GPU-1", Path(sys.argv[1]))
lock.share()
print("in", flush=True)
for line in sys.stdin:
    if line == "step\\n":
        print("gave way" if lock.yield_to_timing() else "went on", flush=True)
    if line == "enter\\n":
        lock.share()
        print("in", flush=True)
    if line == "time\\n":
        with lock.exclusive(lambda: print("waits", flush=True), 60.0) as alone:
            print("alone" if alone else "not alone", flush=True)
            sys.stdin.readline()
        print("over", flush=True)
"""


class Worker:
    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder)], stdin=-1, stdout=-1, text=True
        )

    def say(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def hears(self, skip=None):
        while (line := self.process.stdout.readline().strip()) == skip:
            pass
        return line


@pytest.fixture
def workers(tmp_path):
    made = [Worker(tmp_path), Worker(tmp_path)]
    yield made
    for worker in made:
        worker.process.kill()
        worker.process.communicate()


def test_two_work_together_and_one_times_alone(workers):
    one, two = workers
    assert (one.hears(), two.hears()) == ("in", "in")
    one.say("step")
    assert one.hears() == "went on", "nobody wants to time"
    two.say("time")
    assert two.hears() == "waits", "the other is within a step"
    one.say("step")
    assert two.hears(skip="waits") == "alone"
    two.say("done")
    assert two.hears() == "over"
    assert one.hears() == "gave way"
    one.say("step")
    assert one.hears() == "went on"
    two.say("time")
    assert two.hears() == "waits", "the other still holds it"
    one.say("enter")  # as it comes back from an error
    assert two.hears(skip="waits") == "alone"
    two.say("done")
    assert (two.hears(), one.hears()) == ("over", "in")


def test_patience_ends_and_says_so(tmp_path, workers):
    assert workers[0].hears() == "in"
    waits = []
    lock = TimingLock("GPU-1", tmp_path)
    with lock.exclusive(lambda: waits.append(1), timeout=0.1) as alone:
        assert not alone
    assert waits
    workers[0].say("step")
    assert workers[0].hears() == "went on", "nothing is held after it"
    with TimingLock("GPU-2", tmp_path).exclusive() as alone:
        assert alone, "another device is another matter"
    lock.close()
