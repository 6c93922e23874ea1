"""Drivers that run without a terminal: where each keeps its log, and how it ended.

    <store>/sweeps/<name>/drivers/<n>/  driver.log, driver.json, lock

``driver.json`` says which process (and, on a cluster, which job) it is; once it has ended, also
its exit code. The lock is held as long as the process lives, however it dies.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kvlab.errors import StoreError, UsageError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lease import LeaseWatcher
from kvlab.fs.lock import Lock, seems_held
from kvlab.store import SCHEMA, Store
from kvlab.store.provenance import utc_now

PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.1

DriverState = Literal["running", "ended", "killed"]


@dataclass(frozen=True)
class DetachedDriver:
    """One detached driver, as its folder tells.

    Attributes:
        number: counts the detached drivers of its sweep, from 1.
        host: of the machine that it runs on; on a cluster, of the one that runs the job.
        job: name of the job; None for a process of its own.
        exit_code: once it has ended.
    """

    number: int
    process: int
    host: str
    job: str | None
    started: str
    ended: str | None = None
    exit_code: int | None = None

    @property
    def place(self) -> str:
        """Where it runs, for people."""
        where = f"process {self.process} on {self.host}"
        return f"job {self.job}, {where}" if self.job else where


def create_driver_folder(store: Store, sweep: str) -> int:
    """Makes the next driver's folder; returns its number. Any number may ask at once.

    Raises:
        StoreError: the store cannot be written.
    """
    number = max(list_driver_numbers(store, sweep), default=0)
    while True:
        number += 1
        path = driver_folder(store, sweep, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            continue  # another driver was quicker
        except OSError as error:
            text = f"{path} cannot be made: {error.strerror}"
            raise StoreError(f"{text}; check the store's rights and disk") from None
        return number


def driver_folder(store: Store, sweep: str, number: int) -> Path:
    return store.sweep_directory(sweep) / "drivers" / str(number)


def driver_log(store: Store, sweep: str, number: int) -> Path:
    return driver_folder(store, sweep, number) / "driver.log"


def list_driver_sweeps(store: Store) -> list[str]:
    """The sweeps that have detached drivers, or a record; also such as never began."""
    found = {path.parent.name for path in (store.path / "sweeps").glob("*/drivers")}
    return sorted(found | set(store.sweep_names()))


def list_driver_numbers(store: Store, sweep: str) -> list[int]:
    """The detached drivers that a sweep ever had, the oldest first."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(store.sweep_directory(sweep) / "drivers")
        return sorted(int(name) for name in names if name.isdecimal())
    return []


@contextmanager
def record_driver(store: Store, sweep: str, number: int, job: str | None) -> Iterator[list[int]]:
    """Says for the length of the block that driver ``number`` is this process.

    Gives a list into which the block puts the exit code; left empty, it is 1.
    """
    folder = driver_folder(store, sweep, number)
    facts = DetachedDriver(number, os.getpid(), socket.gethostname(), job, utc_now())
    code: list[int] = []
    with Lock(folder / "lock").hold():
        _write_driver(folder, facts)
        try:
            yield code
        finally:
            known = {**asdict(facts), "ended": utc_now(), "exit_code": code[-1] if code else 1}
            _write_driver(folder, DetachedDriver(**known))


def read_driver(store: Store, sweep: str, number: int) -> tuple[DetachedDriver, DriverState] | None:
    """A driver and how it stands; None if it never came so far as to say who it is."""
    folder = driver_folder(store, sweep, number)
    try:
        found = read_json(folder / "driver.json")
    except (FileNotFoundError, StoreError):
        return None
    facts = DetachedDriver(**{key: found.get(key) for key in DetachedDriver.__dataclass_fields__})
    if facts.exit_code is not None:
        return facts, "ended"
    return facts, "running" if seems_held(folder / "lock") else "killed"


def read_last_driver(store: Store, sweep: str) -> tuple[DetachedDriver, DriverState] | None:
    """The newest detached driver of a sweep, if it has one."""
    numbers = list_driver_numbers(store, sweep)
    return read_driver(store, sweep, numbers[-1]) if numbers else None


def end_detached_driver(store: Store, sweep: str, driver: DetachedDriver) -> None:
    """Ends a driver of this machine that runs, and with it its trials: at once by asking twice,
    as Ctrl-C does, and after `PATIENCE_SECONDS` by SIGKILL.

    Raises:
        UsageError: it runs on another machine.
    """
    if driver.host != socket.gethostname():
        text = f"the driver of {sweep} is {driver.place}, and this is {socket.gethostname()}"
        way_out = f"run `kvlab stop {sweep} --force` on {driver.host}"
        if driver.job:
            way_out = f"run `kvlab stop {sweep} --force --address ADDRESS` with its cluster's"
        asked = f"`kvlab stop {sweep}` without --force asks it from here, to stop at a checkpoint"
        raise UsageError(f"{text}; {way_out} ({asked})")
    lock = driver_folder(store, sweep, driver.number) / "lock"
    # its lock is held, so the process is still the one that wrote its number down
    kills = ((signal.SIGTERM, 1.0), (signal.SIGTERM, PATIENCE_SECONDS), (signal.SIGKILL, 5.0))
    watcher = LeaseWatcher()
    for number, patience in kills:
        if not watcher.is_held(lock):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver.process, number)
        deadline = time.monotonic() + patience
        while watcher.is_held(lock) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _write_driver(folder: Path, facts: DetachedDriver) -> None:
    write_json(folder / "driver.json", {"schema": SCHEMA, **asdict(facts)})
