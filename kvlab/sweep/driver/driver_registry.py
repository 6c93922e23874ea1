"""The drivers of one sweep: how they come, know of each other, and go.

    <store>/sweeps/<name>/lock.<n>          held by one that is just coming or going
                          drivers/<id>.<n>  held by every driver for as long as it is there
                          alone.<n>         held by one that wants no other beside it: a search
                          stop              asks all of them to stop; the last one takes it away

Drivers agree on nothing but leases: a trial belongs to whoever holds its lock.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from kvlab.errors import StoreError, UsageError
from kvlab.fs.lease import lease_seconds
from kvlab.fs.lock import Lock, seems_held
from kvlab.store import Store

LEASE_PATIENCE = 1.5
"""Times the life of a lease: what a lost machine held is free by then."""


@contextmanager
def join_sweep(
    store: Store, name: str, description: Mapping[str, Any] | None, *, alone: bool
) -> Iterator[None]:
    """For the length of the block, this process is a driver of the sweep.

    Args:
        store: of the record.
        name: of the sweep.
        description: for ``sweep.json``, which is written.
        alone: refuse to be one of several, now and later.

    Raises:
        UsageError: another driver is there, and one of the two is alone; or it runs another
            plan under this name; or it is being stopped.
        StoreError: the store cannot be written.
    """
    ours, only = store.driver_lock(name), _exclusive_lock(store, name)
    with ExitStack() as stack:
        with _hold_registry_lock(store, name):
            _check_can_join(store, name, description, alone)
            if alone:
                only.acquire(timeout=LEASE_PATIENCE * lease_seconds())
                stack.callback(only.release)
            store.stop_flag(name).unlink(missing_ok=True)
            ours.acquire()
            stack.callback(_leave_sweep, store, name, ours)
            if description is not None:
                store.write_sweep(dict(description))
        yield


def _exclusive_lock(store: Store, name: str) -> Lock:
    return Lock(store.sweep_directory(name) / "alone")


@contextmanager
def _hold_registry_lock(store: Store, name: str) -> Iterator[None]:
    """One at a time comes or goes, which takes no time."""
    lock = Lock(store.sweep_directory(name) / "lock")
    with lock.hold(timeout=LEASE_PATIENCE * lease_seconds()) as ours:
        if not ours:
            text = f"sweep = {name}: {lock.describe_holder()} has been joining it for too long"
            raise StoreError(f"{text}; end that process, submit again")
        yield


def _leave_sweep(store: Store, name: str, ours: Lock) -> None:
    """The last one takes the request to stop away, which was for all of them."""
    with ExitStack() as stack:
        with contextlib.suppress(StoreError):  # no room on the disk: go all the same
            stack.enter_context(_hold_registry_lock(store, name))
        ours.release()
        if not _other_drivers(store, name):
            store.stop_flag(name).unlink(missing_ok=True)


def _other_drivers(store: Store, name: str) -> list[Lock]:
    return [lock for lock in store.driver_locks(name) if seems_held(lock.path)]


def _check_can_join(
    store: Store, name: str, description: Mapping[str, Any] | None, alone: bool
) -> None:
    others = _other_drivers(store, name)
    if not others:
        return
    who = f"sweep = {name} is being run by {others[0].describe_holder()}"
    way_out = f"wait for it, or end it with `kvlab stop {name}`"
    if alone or seems_held(_exclusive_lock(store, name).path):
        raise UsageError(f"{who}, and a search has one driver; {way_out}")
    if store.stop_flag(name).exists():
        raise UsageError(f"{who}, which has been asked to stop; submit again when it has")
    if description is not None and _recorded_cells(store, name) != _as_json(description["cells"]):
        raise UsageError(f"{who} with other cells than this file's; {way_out}")


def _recorded_cells(store: Store, name: str) -> Any:
    try:
        return store.sweep(name)["cells"]
    except (UsageError, KeyError):
        return None


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
