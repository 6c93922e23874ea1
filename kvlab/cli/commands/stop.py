"""`kvlab stop`: ask a running sweep to stop at its next checkpoints, or end it at once."""

import argparse
import json

from kvlab.cli.shared_arguments import add_cluster, add_json, add_store, sweep_name
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import seems_held
from kvlab.store import Store
from kvlab.sweep.ops.detached_driver import end_detached_driver, read_last_driver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="name or file of a sweep that is running")
    parser.add_argument(
        "--force",
        action="store_true",
        help="end its detached driver and its trials now; submitted again, they go on from their"
        " last checkpoints",
    )
    add_store(parser)
    add_cluster(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store, name = Store(options.store), sweep_name(options.sweep)
    if options.address:
        from kvlab.cli.remote_commands import remote_stop

        return remote_stop(options.address, name, force=options.force, as_json=options.json)
    if options.force:
        return _force_stop(store, name, as_json=options.json)
    if not store.is_driven(name):  # a driver that prepares the text has written nothing yet
        store.sweep(name)
        raise UsageError(f"sweep = {name} is not running; see `kvlab status {name}`")
    write_atomic(store.stop_flag(name), "")
    if options.json:
        print(json.dumps({"sweep": name, "asked_to_stop": True}))
    else:
        print(f"{name} stops at its next checkpoints; submit it again to go on")
    return 0


def _force_stop(store: Store, name: str, *, as_json: bool) -> int:
    last = read_last_driver(store, name)
    if last is None or last[1] != "running":
        raise UsageError(_explain_no_detached_driver(store, name))
    end_detached_driver(store, name, last[0])
    if as_json:
        print(json.dumps({"sweep": name, "ended": True}))
    else:
        print(f"{name} was ended; submit it again to go on from the last checkpoints")
    return 0


def _explain_no_detached_driver(store: Store, name: str) -> str:
    """Explain why ``--force`` ends nothing, and how to end the drivers that run."""
    holders = [lock.describe_holder() for lock in store.driver_locks(name) if seems_held(lock.path)]
    if not holders:
        text = f"sweep = {name} has no detached driver that runs, nor any other"
        return f"{text}; see `kvlab status {name}`"
    text = f"sweep = {name} has no detached driver that runs, but {' and '.join(holders)}"
    text = f"{text}, which --force does not end: press Ctrl-C twice in its terminal, or run"
    hint = f"`kvlab stop {name}` without --force asks it to stop at a checkpoint"
    return f"{text} `kill PROCESS` twice on its machine ({hint})"
