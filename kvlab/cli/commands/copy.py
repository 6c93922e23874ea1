"""`kvlab copy`: finished results and weights to object storage, or back from it."""

import argparse
import json
from dataclasses import asdict

from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.store import Store
from kvlab.store.object_storage import ObjectStorage
from kvlab.store.sweep_backup import (
    BackupSummary,
    check_outside_store,
    copy_sweep,
    list_copied_sweeps,
    restore_sweep,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help="name or file; default: all")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to", metavar="URL", help="copy there what is new here: s3://bucket/folder, a folder, ..."
    )
    direction.add_argument(
        "--from", dest="origin", metavar="URL", help="bring back what is not here"
    )
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    copies = ObjectStorage(options.to or options.origin)
    check_outside_store(copies, store)
    asked = None if options.sweep is None else [sweep_name(options.sweep)]
    if options.to:
        names = asked or store.sweep_names()
        for name in names:
            store.sweep(name)  # refuse an unknown sweep before anything is copied
        found = [copy_sweep(store, copies, name) for name in names]
    else:
        names = asked or list_copied_sweeps(copies)
        found = [restore_sweep(store, copies, name) for name in names]
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    elif not found:
        place = options.store if options.to else copies.url
        print(f"{place} holds no sweep; nothing to do")
    else:
        for one in found:
            print(_summary_line(one, f"to {copies.url}" if options.to else f"to {options.store}"))
            for text in one.damaged:
                print(f"  {text}")
    return int(any(one.damaged for one in found))


def _summary_line(copied: BackupSummary, where: str) -> str:
    parts = [
        f"{copied.trials} trials copied {where} ({copied.files} files)",
        f"{copied.unchanged} were there",
    ]
    if copied.missing:
        parts.append(f"{copied.missing} have no result yet")
    if copied.in_use:
        parts.append(f"{copied.in_use} left, because a process uses them now")
    return f"{copied.sweep}: {', '.join(parts)}"
