"""`kvlab copy`: copy finished results and weights to object storage, or a record to one file."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.errors import UsageError
from kvlab.store import Store
from kvlab.store.object_storage import ObjectStorage
from kvlab.store.record_archive import (
    ARCHIVE_SUFFIX,
    extract_archive,
    is_archive,
    write_archive,
)
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
        "--to",
        metavar="URL",
        help=f"copy what is new here to s3://bucket/folder, a folder, ...; FILE{ARCHIVE_SUFFIX}"
        " gets the record of SWEEP without weights, enough for its report",
    )
    direction.add_argument(
        "--from", dest="origin", metavar="URL", help="restore what is missing here"
    )
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    if is_archive(options.to or options.origin):
        return _copy_archive(store, options)
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


def _copy_archive(store: Store, options: argparse.Namespace) -> int:
    """Write the record of a sweep to one file, or put what the file has into the store."""
    path = Path(options.to or options.origin)
    if options.to:
        if options.sweep is None:
            raise UsageError(f"--to {path} is the record of one sweep; name it: `kvlab copy SWEEP`")
        summary = write_archive(store, sweep_name(options.sweep), path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            archive = extract_archive(path, Path(folder, "record"))
            storage = ObjectStorage(str(Path(folder, "copy")))
            [name] = archive.sweep_names()
            if options.sweep is not None and sweep_name(options.sweep) != name:
                text = f"{path} is the record of {name}, not of {sweep_name(options.sweep)}"
                raise UsageError(f"{text}; leave the name out")
            copy_sweep(archive, storage, name)
            summary = restore_sweep(store, storage, name)
    if options.json:
        print(json.dumps([asdict(summary)], indent=1))
    else:
        print(_format_summary(summary, str(path if options.to else options.store)))
    return int(bool(summary.damaged))


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
