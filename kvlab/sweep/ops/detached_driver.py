"""Drivers that run without a terminal: their folders, their logs, and how they ended.

    <store>/sweeps/<name>/drivers/<n>/  driver.log, driver.json, lock

``driver.json`` names the process and, on a cluster, the job; once it has ended, it has the exit
code, too. The lock is held as long as the process lives, however it dies.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from kvlab.errors import StoreError, UsageError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lease import LeaseWatcher
from kvlab.fs.lock import Lock, seems_held
from kvlab.fs.sealed_files import check_form
from kvlab.store import SCHEMA, Store
from kvlab.store.provenance import utc_now

PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.1

DriverState = Literal["running", "ended", "killed"]


@dataclass(frozen=True)
class DetachedDriver:
    """One detached driver: the content of ``driver.json``.

    Attributes:
        number: Of the detached drivers of its sweep, from 1.
        process: Process id.
        host: Name of the machine that it runs on.
        job: Name of the Ray job; None for a process of its own.
        started, ended: Times in UTC.
        exit_code: None as long as it runs.
    """

    number: int
    process: int
    host: str
    job: str | None
    started: str
    ended: str | None = None
    exit_code: int | None = None

    @property
    def location(self) -> str:
        """Where it runs, for people."""
        process = f"process {self.process} on {self.host}"
        return f"job {self.job}, {process}" if self.job else process


def create_driver_folder(store: Store, sweep: str) -> int:
    """Create the next driver's folder and return its number. Processes may call it at once.

    Raises:
        StoreError: The store cannot be written.
    """
    number = max(list_driver_numbers(store, sweep), default=0)
    while True:
        number += 1
        path = driver_folder(store, sweep, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            continue  # another process was faster
        except OSError as error:
            text = f"{path} cannot be made: {error.strerror}"
            raise StoreError(f"{text}; check the store's permissions and disk") from None
        return number


def driver_folder(store: Store, sweep: str, number: int) -> Path:
    return store.sweep_directory(sweep) / "drivers" / str(number)


def driver_log(store: Store, sweep: str, number: int) -> Path:
    return driver_folder(store, sweep, number) / "driver.log"


def list_driver_sweeps(store: Store) -> list[str]:
    """Return the sweeps that have a record or detached drivers, even if those never began."""
    driven = {path.parent.name for path in (store.path / "sweeps").glob("*/drivers")}
    return sorted(driven | set(store.sweep_names()))


def list_driver_numbers(store: Store, sweep: str) -> list[int]:
    """Return the numbers of all detached drivers that a sweep has had, the oldest first."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(store.sweep_directory(sweep) / "drivers")
        return sorted(int(name) for name in names if name.isdecimal())
    return []


@contextmanager
def record_driver(store: Store, sweep: str, number: int, job: str | None) -> Iterator[list[int]]:
    """Record for the length of the block that this process is driver ``number``.

    Yields:
        A list to which the block appends the exit code; if it stays empty, the code is 1.
    """
    folder = driver_folder(store, sweep, number)
    driver = DetachedDriver(number, os.getpid(), socket.gethostname(), job, utc_now())
    exit_codes: list[int] = []
    with Lock(folder / "lock").hold():
        _write_driver(folder, driver)
        try:
            yield exit_codes
        finally:
            exit_code = exit_codes[-1] if exit_codes else 1
            _write_driver(folder, replace(driver, ended=utc_now(), exit_code=exit_code))


def read_driver(store: Store, sweep: str, number: int) -> tuple[DetachedDriver, DriverState] | None:
    """Return a driver and its state; None if it never came so far as to write its record."""
    folder = driver_folder(store, sweep, number)
    try:
        record = read_json(folder / "driver.json")
        check_form(folder / "driver.json", record, dict)
        names = {field.name for field in fields(DetachedDriver)}
        known = {name: record[name] for name in names & record.keys()}
        check_form(folder / "driver.json", known, DetachedDriver)
    except (FileNotFoundError, StoreError):
        return None
    driver = DetachedDriver(**known)
    if driver.exit_code is not None:
        return driver, "ended"
    return driver, "running" if seems_held(folder / "lock") else "killed"


def read_last_driver(store: Store, sweep: str) -> tuple[DetachedDriver, DriverState] | None:
    """Return the newest detached driver of a sweep and its state, if it has one."""
    numbers = list_driver_numbers(store, sweep)
    return read_driver(store, sweep, numbers[-1]) if numbers else None


def end_detached_driver(store: Store, sweep: str, driver: DetachedDriver) -> None:
    """End a running driver of this machine and its trials.

    Two SIGTERM end it at once, as a second Ctrl-C does; SIGKILL follows after `PATIENCE_SECONDS`.

    Raises:
        UsageError: It runs on another machine.
    """
    if driver.host != socket.gethostname():
        text = f"the driver of {sweep} is {driver.location}, and this is {socket.gethostname()}"
        hint = f"run `kvlab stop {sweep} --force` on {driver.host}"
        if driver.job:
            hint = f"run `kvlab stop {sweep} --force --address ADDRESS` with its cluster's"
        gentle = f"`kvlab stop {sweep}` without --force asks it from here, to stop at a checkpoint"
        raise UsageError(f"{text}; {hint} ({gentle})")
    lock = driver_folder(store, sweep, driver.number) / "lock"
    # While its lock is held, the process is still the one that wrote its id.
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


def _write_driver(folder: Path, driver: DetachedDriver) -> None:
    write_json(folder / "driver.json", {"schema": SCHEMA, **asdict(driver)})
