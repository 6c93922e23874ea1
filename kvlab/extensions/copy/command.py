"""`kvlab copy`: write the record of a sweep to one file, here or in object storage, and read it."""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from kvlab.cli.shared_arguments import ALL_SWEEPS, add_flag, add_record, sweep_name
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError
from kvlab.extensions.copy import record_copies
from kvlab.extensions.copy.record_copies import CopySummary
from kvlab.humanize import redact_url
from kvlab.store import Store
from kvlab.store.record_archive import ARCHIVE_SUFFIX, extract_archive, is_archive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser, ALL_SWEEPS)
    direction = parser.add_mutually_exclusive_group(required=True)
    text = f"write the record to this FILE{ARCHIVE_SUFFIX}, folder or URL (s3://bucket/folder)"
    direction.add_argument("--to", metavar="PLACE", help=text)
    text = "restore what the store lacks"
    direction.add_argument("--from", dest="origin", metavar="PLACE", help=text)
    add_flag(parser, "--weights", "with --to: also weights and checkpoints")


def run(options: argparse.Namespace) -> None:
    store = Store(options.store)
    place: str = options.to or options.origin or ""
    if not place:
        raise UsageError("the place of the copy is empty; name a file, a folder or a URL")
    name = None if options.sweep is None else sweep_name(options.sweep)
    if options.to:
        if name is None and is_archive(place):
            text = f"--to {place} is the record of one sweep"
            raise UsageError(f"{text}; name it: `kvlab copy SWEEP`")
        record_copies.check_place(place, store)
        names = store.sweep_names() if name is None else [name]
        for known in names:
            store.sweep(known)  # refuse an unknown sweep before anything is copied
        summaries = [record_copies.copy_sweep(store, n, place, options.weights) for n in names]
    elif options.weights:
        raise UsageError("--weights belongs to --to; --from takes all that the archive has")
    else:
        if name is None and not is_archive(place):
            archives = record_copies.list_archives(place)
            if not archives:
                text = f"--from {redact_url(place)} holds no sweep"
                raise UsageError(f"{text}; name a place that `kvlab copy --to` has written")
        else:
            archives = [record_copies.archive_at(place, name or "")]
        summaries = [_restore(store, archive, name) for archive in archives]
    target = redact_url(place) if options.to else options.store
    lines = []
    for one in summaries:
        others = {
            "were there": one.unchanged,
            "have no result yet": one.missing,
            "left, because a process uses them now": one.in_use,
        }
        parts = [f"{one.trials} trials copied to {target} ({one.files} files)"]
        parts += [f"{number} {state}" for state, number in others.items() if number]
        lines.append(f"{one.sweep}: {', '.join(parts)}")
    text = "\n".join(lines) or f"{options.store} holds no sweep; nothing to do"
    print_result(options, [asdict(summary) for summary in summaries], text)


def _restore(store: Store, place: str, name: str | None) -> CopySummary:
    """Put what an archive has into the store."""
    with tempfile.TemporaryDirectory() as folder:
        file = record_copies.fetch_archive(place, Path(folder))
        archive = extract_archive(file, Path(folder, "record"))
        [found] = archive.sweep_names()
        if name is not None and name != found:
            text = f"{redact_url(place)} is the record of {found}, not of {name}"
            raise UsageError(f"{text}; leave the name out")
        return record_copies.restore_archive(store, archive)
