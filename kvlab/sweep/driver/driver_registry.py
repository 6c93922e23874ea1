"""The drivers of one sweep: how they register, find each other, stop and leave.

    <store>/sweeps/<name>/lock.<n>          held while a driver joins or leaves
                          drivers/<id>.<n>  held by each driver for as long as it runs
                          alone.<n>         held by a driver that admits no other: a search
                          stop              asks all drivers to stop; removed by the last one

Drivers share nothing but leases: a trial belongs to the process that holds its lock.
A driver stops by Ctrl-C or SIGTERM, or by `kvlab stop`, which asks all drivers of a sweep.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kvlab.errors import RecordDamaged, Stopped, StoreError, UsageError
from kvlab.fs.lease import lease_seconds
from kvlab.fs.lock import Lock, free_abandoned, seems_held
from kvlab.store import Store

LEASE_PATIENCE = 1.5
"""Patience for a lock, in lifetimes of a lease: the locks of a lost machine are free by then."""


@contextmanager
def join_sweep(
    store: Store, name: str, description: Mapping[str, Any] | None, *, exclusive: bool
) -> Iterator[None]:
    """Register a driver of the sweep for the length of the block.

    Args:
        description: Written to ``sweep.json``, unless that describes a later stage already.
        exclusive: Refuse other drivers, now and later.

    Raises:
        UsageError: Another driver runs, and one of the two is exclusive, or its plan has other
            cells, or declares other stages, or it has been asked to stop.
        StoreError: The store cannot be written.
    """
    own_lock = store.driver_lock(name)

    def leave() -> None:
        with ExitStack() as stack:
            with contextlib.suppress(StoreError):  # the disk is full: leave all the same
                stack.enter_context(_hold_registry_lock(store, name))
            own_lock.release()
            if not store.is_driven(name):  # the last one removes the request to stop
                store.stop_flag(name).unlink(missing_ok=True)

    with ExitStack() as stack:
        with _hold_registry_lock(store, name):
            alone = Lock(store.sweep_directory(name) / "alone")
            try:
                recorded = _check_can_join(store, name, description, exclusive)
            except UsageError:  # the driver of a lost machine seems to run for some minutes
                free_abandoned([*(one.path for one in store.held_driver_locks(name)), alone.path])
                recorded = _check_can_join(store, name, description, exclusive)
            if exclusive:
                stack.enter_context(alone.hold(timeout=LEASE_PATIENCE * lease_seconds()))
            store.stop_flag(name).unlink(missing_ok=True)
            own_lock.acquire()
            stack.callback(leave)
            own: Any = (description or {}).get("stages")
            other: Any = recorded.get("stages")
            # another driver of the same stages may have gone on since this one was planned
            has_gone_on = _are_of_one_sweep(own, other) and other["number"] > own["number"]
            if description is not None and not has_gone_on:
                seeds = set(description.get("seeds", ()))
                # not where tests of claims are declared: `write_report` leaves those out
                earlier = [one for one in store.reported_seeds(name) if set(one) < seeds]
                reported = {"reported_seeds": earlier} if earlier else {}
                store.write_sweep({**description, **reported})
        yield


@contextmanager
def _hold_registry_lock(store: Store, name: str) -> Iterator[None]:
    """Let one driver at a time join or leave, which takes no time."""
    lock = Lock(store.sweep_directory(name) / "lock")
    with lock.hold(timeout=LEASE_PATIENCE * lease_seconds()) as fence:
        if fence is None:
            text = f"sweep = {name}: {lock.describe_holder()} has been joining it for too long"
            raise StoreError(f"{text}; end that process, submit again")
        yield


def _check_can_join(
    store: Store, name: str, description: Mapping[str, Any] | None, exclusive: bool
) -> Mapping[str, Any]:
    """Return the sweep's description in the record, empty if there is none that can be read."""
    others = store.held_driver_locks(name)
    recorded: dict[str, Any] = {}
    try:
        recorded = store.sweep(name)
    except UsageError:  # its first driver
        pass
    except StoreError as error:  # a driver alone writes what is damaged anew
        if others or not isinstance(error, RecordDamaged):
            raise
    if not others:
        return recorded
    text = f"sweep = {name} is being run by {others[0].describe_holder()}"
    hint = f"wait for it, or end it with `kvlab stop {name}`"
    if exclusive or seems_held(store.sweep_directory(name) / "alone"):
        raise UsageError(f"{text}, and a search has one driver; {hint}")
    if store.stop_flag(name).exists():
        raise UsageError(f"{text}, which has been asked to stop; submit again when it has")
    if description is not None and recorded:  # else it was removed, and is written again
        ours, theirs = _as_json(description), recorded
        is_same = _are_of_one_sweep(ours.get("stages"), theirs.get("stages"))
        if "stages" not in ours and "stages" not in theirs:  # else cells grow from stage to stage
            is_same = ours.get("cells") == theirs.get("cells")
        if not is_same:
            raise UsageError(f"{text} with other cells than this file's; {hint}")
        if ours.get("code") and theirs.get("code") and ours["code"] != theirs["code"]:
            raise UsageError(f"{text} with other code than this; {hint}, or use --code mix")
    return recorded


def _are_of_one_sweep(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> bool:
    """Return whether two stages declare the same; later ones may declare more."""
    if not ours or not theirs:
        return False
    one, other = _as_json(ours["declared"]), theirs["declared"]
    shared = one.keys() & other.keys()
    return bool(shared) and all(one[key] == other[key] for key in shared)


def _as_json(value: Any) -> Any:
    """Return a value as the record has it: JSON has no tuples, and its keys are text."""
    return json.loads(json.dumps(value))


# Stopping


class StopRequest:
    """The request that one driver stop, seen by the driver and by its trials.

    A request is a file, since trials run in other processes: the sweep's stop flag, which all of
    its drivers obey, or this driver's own.
    """

    def __init__(self, store: Store, sweep: str, own_flag: Path | None):
        shared_flag = store.stop_flag(sweep)
        self._own_flag = own_flag or shared_flag
        self._flags = (shared_flag, self._own_flag)
        self.is_noticed = False

    def request(self) -> None:
        """Ask this driver and its trials to stop. Safe in a signal handler.

        Raises:
            OSError: The disk is full.
        """
        self.is_noticed = True
        with contextlib.suppress(FileNotFoundError):  # no folder yet: nothing runs yet
            self._own_flag.touch()

    def is_pending(self) -> bool:
        """Return whether one of the files is there now, whatever was noticed before."""
        return any(flag.exists() for flag in self._flags)

    def check(self) -> None:
        """Raise Stopped once the driver has been asked to stop."""
        self.is_noticed = self.is_noticed or self.is_pending()
        if self.is_noticed:
            raise Stopped("asked to stop")

    def withdraw(self) -> None:
        """Remove this driver's own file, once none of its trials runs."""
        if self._own_flag != self._flags[0]:  # the shared one is removed by the last driver
            self._own_flag.unlink(missing_ok=True)


SAME_REQUEST_SECONDS = 1.0


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGINT or SIGTERM; raise KeyboardInterrupt at a later one.

    Signals within `SAME_REQUEST_SECONDS` of the first belong to it: a launcher may send one to a
    process and to its group. Only for the main thread, where Python handles signals; it calls a
    handler once for all of a kind that came while the thread was in C code.
    """
    received: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (Python's signature)
        nonlocal received
        if received is None:
            received = time.monotonic()
            stop()
        elif time.monotonic() - received >= SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt

    previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
