"""`kvlab copy`: copy finished results and weights to object storage, or restore them."""

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
        "--to", metavar="URL", help="copy what is new here to s3://bucket/folder, a folder, ..."
    )
    direction.add_argument(
        "--from", dest="origin", metavar="URL", help="restore what is missing here"
    )
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    storage = ObjectStorage(options.to or options.origin)
    check_outside_store(storage, store)
    names = None if options.sweep is None else [sweep_name(options.sweep)]
    if options.to:
        source, target = options.store, storage.url
        names = names or store.sweep_names()
        for name in names:
            store.sweep(name)  # refuse an unknown sweep before anything is copied
        summaries = [copy_sweep(store, storage, name) for name in names]
    else:
        source, target = storage.url, options.store
        names = names or list_copied_sweeps(storage)
        summaries = [restore_sweep(store, storage, name) for name in names]
    if options.json:
        print(json.dumps([asdict(summary) for summary in summaries], indent=1))
    elif not summaries:
        print(f"{source} holds no sweep; nothing to do")
    else:
        for summary in summaries:
            print("\n  ".join([_format_summary(summary, target), *summary.damaged]))
    return int(any(summary.damaged for summary in summaries))


def _format_summary(summary: BackupSummary, target: str) -> str:
    parts = [
        f"{summary.trials} trials copied to {target} ({summary.files} files)",
        f"{summary.unchanged} were there",
    ]
    if summary.missing:
        parts.append(f"{summary.missing} have no result yet")
    if summary.in_use:
        parts.append(f"{summary.in_use} left, because a process uses them now")
    return f"{summary.sweep}: {', '.join(parts)}"
