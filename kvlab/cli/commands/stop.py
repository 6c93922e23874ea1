"""`kvlab stop`: ask a running sweep to stop at its next checkpoints."""

import argparse

from kvlab.cli.shared_arguments import add_record, sweep_name
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser, "name or file of a sweep that is running")


def run(options: argparse.Namespace) -> None:
    store, name = Store(options.store), sweep_name(options.sweep)
    store.sweep(name)
    if not store.is_driven(name):
        raise UsageError(f"sweep = {name} is not running; see `kvlab status {name}`")
    write_atomic(store.stop_flag(name), "")
    text = f"{name} stops at its next checkpoints; submit it again to go on"
    print_result(options, {"sweep": name, "asked_to_stop": True}, text)
