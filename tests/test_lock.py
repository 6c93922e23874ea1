"""Locks, between processes."""

import os
import signal
import subprocess
import sys

import pytest

from kvlab.errors import StoreError
from kvlab.lock import Lock, is_held

HOLD = """
import sys, time
from kvlab.lock import Lock
lock = Lock(sys.argv[1])
lock.acquire()
lock.note("somebody")
print("held", flush=True)
time.sleep(600)
"""

COUNT = """
import sys
from pathlib import Path
from kvlab.lock import Lock
count = Path(sys.argv[2])
for _ in range(200):
    with Lock(sys.argv[1]).hold(on_wait=lambda: None):
        count.write_text(str(int(count.read_text()) + 1))
"""


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=-1)


@pytest.fixture
def holder(tmp_path):
    process = python(HOLD, tmp_path / "deep" / "lock")
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_is_kept_out_and_told_who_holds_it(tmp_path, holder):  # noqa: ARG001
    lock = Lock(tmp_path / "deep" / "lock")
    assert is_held(lock.path)
    assert lock.acquire(patience=0.0) is False
    assert lock.noted() == "somebody"


def test_a_holder_that_is_killed_lets_go(tmp_path, holder):
    lock = Lock(tmp_path / "deep" / "lock")
    os.kill(holder.pid, signal.SIGKILL)
    with lock.hold(patience=60.0) as ours:
        assert ours
        assert is_held(lock.path)
    assert not is_held(lock.path)


def test_what_a_waiter_raises_ends_its_waiting(tmp_path, holder):  # noqa: ARG001
    tries = []

    def give_up():
        tries.append(1)
        if len(tries) == 3:
            raise KeyError("enough")

    with (
        pytest.raises(KeyError, match="enough"),
        Lock(tmp_path / "deep" / "lock").hold(None, give_up),
    ):
        pytest.fail("the other process holds it")
    assert len(tries) == 3


def test_one_at_a_time(tmp_path):
    count = tmp_path / "count"
    count.write_text("0")
    for process in [python(COUNT, tmp_path / "lock", count) for _ in range(3)]:
        process.communicate()
        assert process.returncode == 0
    assert count.read_text() == "600"


def test_two_locks_of_one_process_exclude_each_other(tmp_path):
    with (
        Lock(tmp_path / "lock").hold() as ours,
        Lock(tmp_path / "lock").hold(patience=0.0) as other,
    ):
        assert (ours, other) == (True, False)


def test_asking_makes_nothing(tmp_path):
    assert not is_held(tmp_path / "deep" / "lock")
    assert not (tmp_path / "deep").exists()


def test_a_place_that_cannot_be_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be locked") as caught:
        Lock(tmp_path / "file" / "lock").acquire()
    assert "\n" not in str(caught.value)
