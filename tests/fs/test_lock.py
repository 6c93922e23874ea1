"""Locks and leases between processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvlab.errors import StoreError, UsageError
from kvlab.fs import lease
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lease import LeaseWatcher, create_lease
from kvlab.fs.lock import GRACE_SECONDS, Lock, seems_held

HOLD = """
import sys, time
from kvlab.fs.lock import Lock
lock = Lock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""

COUNT = """
import sys
from pathlib import Path
from kvlab.fs.lock import Lock
count = Path(sys.argv[2])
for _ in range(100):
    with Lock(sys.argv[1]).hold(on_wait=lambda: None):
        count.write_text(str(int(count.read_text()) + 1))
"""

WRITE = """
import sys
from pathlib import Path
from kvlab.errors import LeaseLost
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import Lock
folder = Path(sys.argv[1])
with Lock(folder / "lock").hold() as fence:
    write_atomic(folder / "deep" / "result", "first", fence=fence)
    print("written", flush=True)
    sys.stdin.readline()
    try:
        write_atomic(folder / "deep" / "result", "late", fence=fence)
    except LeaseLost as error:
        print("lost", flush=True)
"""


def start_python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdin=-1, stdout=-1)


@pytest.fixture
def watcher():
    return LeaseWatcher()


def test_another_process_cannot_acquire_a_held_lock_until_its_holder_is_dead(tmp_path, watcher):
    lock = Lock(tmp_path / "deep" / "lock")
    holder = start_python(HOLD, lock.path)
    assert holder.stdout.readline() == b"held\n"
    assert watcher.is_held(lock.path)
    assert lock.acquire(timeout=0.0) is None
    assert lock.describe_holder().startswith(f"process {holder.pid} since 2")
    said = lock.describe_wait("runs this trial")
    assert said.startswith(f"process {holder.pid} runs this trial since 2")
    assert said.endswith("when that process finishes or dies, or gives no sign of life for 60 s")
    assert not watcher.free_if_abandoned(lock.path)
    assert watcher.free_if_abandoned(tmp_path / "other")
    assert os.listdir(tmp_path) == ["deep"]
    with pytest.raises(ZeroDivisionError), lock.hold(on_wait=lambda: 1 / 0):
        pytest.fail("the other process holds it")
    holder.kill()
    with lock.hold(timeout=60.0) as fence:
        holder.communicate()
        assert fence
        assert watcher.is_held(lock.path)
    assert not watcher.is_held(lock.path)


def test_critical_sections_of_processes_do_not_overlap(tmp_path):
    count = tmp_path / "count"
    count.write_text("0")
    for process in [start_python(COUNT, tmp_path / "lock", count) for _ in range(3)]:
        process.communicate()
        assert process.returncode == 0
    assert count.read_text() == "300"


def test_an_outdated_number_is_not_acquired_even_if_a_later_holder_removes_it(
    tmp_path, monkeypatch
):
    path, list_numbers = tmp_path / "lock", lease._list_numbers

    def list_after_takeover(path):
        assert lease.read_lease(lease.lease_path(path, 3)).is_held, "ours is there"
        monkeypatch.setattr(lease, "_list_numbers", list_numbers)
        assert lease.create_lease(path, 9)
        assert lease.read_lease(lease.lease_path(path, 3)) is None
        return list_numbers(path)

    monkeypatch.setattr(lease, "_list_numbers", list_after_takeover)
    assert lease.create_lease(path, 3) is None
    for number in (9, 3):
        assert lease.create_lease(path, number) is None
    assert os.listdir(tmp_path) == ["lock.9"]


def test_a_query_creates_no_files_and_an_impossible_path_is_refused(tmp_path, watcher):
    assert not watcher.is_held(tmp_path / "deep" / "lock")
    assert not (tmp_path / "deep").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be locked"):
        Lock(tmp_path / "file" / "lock").acquire()


def test_a_process_that_wakes_up_after_a_takeover_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", "1")
    suspended = start_python(WRITE, tmp_path)
    assert suspended.stdout.readline() == b"written\n"
    suspended.send_signal(signal.SIGSTOP)
    with Lock(tmp_path / "lock").hold(timeout=60.0) as fence:
        write_atomic(tmp_path / "deep" / "result", "second", fence=fence)
        suspended.send_signal(signal.SIGCONT)
        assert suspended.communicate(b"go on\n", timeout=60)[0] == b"lost\n"
        assert fence.holds(), "the release of the late process does not concern this lock"
        assert [path.name for path in tmp_path.glob("lock*")] == ["lock.2"]
    assert (tmp_path / "deep" / "result").read_text() == "second"
    assert os.listdir(tmp_path / "deep") == ["result"]


def write_foreign_lease(path: Path, *, beat: int = 0, **facts) -> str:
    """Write a lease as a process on another machine does; return its path."""
    facts = {"token": "t", "seconds": 1.0, "since": "then", "host": "far", "boot": "b",
             "space": "s", "pid": 1, "born": "0", **facts}  # fmt: skip
    lease_file = f"{path}.7"
    Path(lease_file).write_text(f"held {beat:012d} {json.dumps(facts)}\n")
    return lease_file


@pytest.mark.parametrize("jump", [0.0, -7e7, 7e7])
def test_a_heartbeat_keeps_a_lease_and_silence_ends_it_whatever_the_wall_clock_says(
    tmp_path, watcher, monkeypatch, jump
):
    path, now, real = tmp_path / "lock", [0.0], time.time
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: real() + jump * (now[0] > 0.5))
    for beat in range(30):  # longer than a lease
        lease_file = write_foreign_lease(path, beat=beat)
        assert watcher.is_held(path)
        now[0] += 0.05
    now[0] += 1.2
    assert watcher.is_held(path), "this process may have been suspended with the holder"
    silent = 0
    while watcher.is_held(path):
        now[0] += 0.05
        silent += 1
    assert 14 <= silent <= 16, "a gap counts as a quarter of the second"
    assert not Lock(path).acquire(timeout=0.0), "a first look cannot tell"
    assert watcher.free_if_abandoned(path)
    assert Lock(path).acquire(timeout=0.0)
    assert not os.path.exists(lease_file)


@pytest.mark.parametrize("has_proc", [True, False])  # macOS has none
def test_a_dead_process_is_recognized_only_on_its_own_machine(
    tmp_path, watcher, monkeypatch, has_proc
):
    monkeypatch.setattr(lease, "_process_identity", lease._process_identity.__wrapped__)
    if not has_proc:
        monkeypatch.setattr(lease, "_read_text", lambda _: "")
    process = start_python("")
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    write_foreign_lease(tmp_path / "lock", **{**lease.process_identity(), "pid": process.pid})
    assert not watcher.is_held(tmp_path / "lock"), "it has ended"
    process.wait()
    dead = {**lease.process_identity(), "pid": process.pid}
    write_foreign_lease(tmp_path / "lock", **dead)
    assert not watcher.is_held(tmp_path / "lock")
    for other in ({"host": "far"}, {"boot": "another"}, {"space": "another"}):
        write_foreign_lease(tmp_path / "lock", **{**dead, **other})
        assert watcher.is_held(tmp_path / "lock")
    write_foreign_lease(tmp_path / "lock", **lease.process_identity())
    assert watcher.is_held(tmp_path / "lock")
    write_foreign_lease(tmp_path / "lock", **{**lease.process_identity(), "born": "1"})
    assert not watcher.is_held(tmp_path / "lock"), "its process id was reused"


@pytest.mark.parametrize("text", ["soon", "0.5", "nan"])
def test_an_invalid_lease_duration_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", text)
    with pytest.raises(UsageError, match="KVLAB_LEASE_SECONDS"):
        Lock(tmp_path / "lock").acquire()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path, watcher):
    lock = Lock(tmp_path / "lock")
    fence = lock.acquire()
    assert Lock(tmp_path / "lock").acquire(timeout=0.0) is None, "of this process, too"
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    fence.check()
    lock.release()
    assert not watcher.is_held(lock.path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text('held 000000000001 {"seconds": "many", "pid": 1}'),
        lambda path: path.write_text("held 000000000001 " + '{"a":' * 300 + "1" + "}" * 300),
        Path.touch,
        lambda path: path.write_text("\0" * 200),
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("nowhere"),
    ],
)
def test_a_lease_that_nobody_writes_so_is_given_up_after_that_of_the_watcher(
    tmp_path, watcher, monkeypatch, make
):
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", "8")
    make(tmp_path / "lock.1")
    descriptors = os.listdir("/dev/fd")
    assert seems_held(tmp_path / "lock")
    assert os.listdir("/dev/fd") == descriptors, "they are closed"
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    looks = [watcher.is_held(tmp_path / "lock")]
    said = Lock(tmp_path / "lock").describe_wait("runs this trial")
    assert said.startswith("another process runs this trial; the wait ends when that process")
    for _ in range(4):
        now[0] += 2.0
        looks.append(watcher.is_held(tmp_path / "lock"))
    assert looks == [True] * 4 + [False]
    assert Lock(tmp_path / "lock").acquire(timeout=0.0) is None, "a new watcher looks first"
    remove = os.unlink

    def unlink(name, **options):
        if os.path.isdir(name):  # as macOS says it; Linux says EISDIR
            raise PermissionError(errno.EPERM, "Operation not permitted", str(name))
        remove(name, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    fence = create_lease(tmp_path / "lock", 2)
    assert fence is not None
    assert fence.holds()


def test_one_look_goes_by_the_clock_that_stamps_the_files(tmp_path, monkeypatch):
    """That of a file server, which may be set; not that of this machine."""
    lease_file, server, real = write_foreign_lease(tmp_path / "lock", seconds=60.0), 5e9, os.fstat

    def stamp(handle):
        state = list(real(handle))
        return os.stat_result([*state[:8], server, *state[9:]])

    monkeypatch.setattr(os, "fstat", stamp)
    for jump in (0.0, -1e6, 3e6):
        server += jump
        for age in (0.0, 60.0 + GRACE_SECONDS - 5.0, 60.0 + GRACE_SECONDS + 5.0):
            os.utime(lease_file, (server - age, server - age))
            assert seems_held(tmp_path / "lock") == (age < 60.0 + GRACE_SECONDS), (jump, age)
    monkeypatch.undo()
    assert not seems_held(tmp_path / "lock"), "of long ago"
    with Lock(tmp_path / "other").hold():
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert seems_held(tmp_path / "other")
