"""`kvlab verify`: check every file of the record; with --heal move aside what is damaged."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from kvlab.cli.shared_arguments import ALL_SWEEPS, add_flag, add_record, open_store, sweep_name
from kvlab.cli.terminal import print_result, show_status_line
from kvlab.data import dataset_preparation, shards
from kvlab.errors import DataError, UsageError
from kvlab.humanize import format_bytes, format_count
from kvlab.store.record_archive import is_archive
from kvlab.store.verification import Damage, Verification, heal, verify_record
from kvlab.trial.code_identity import TrialCode

IN_USE = "left, because a process uses it now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser, ALL_SWEEPS, archive=True)
    add_flag(parser, "--heal", "move damaged files into damaged/ folders")


def run(options: argparse.Namespace) -> int:
    name = None if options.sweep is None else sweep_name(options.sweep)
    if options.heal and is_archive(options.store):
        text = f"--heal: {options.store} is one file, from which nothing can be moved aside"
        raise UsageError(f"{text}; write it anew from a store that is whole")
    store = open_store(options.store)
    found = verify_record(store, name, show_status_line if sys.stderr.isatty() else None)
    codes = [TrialCode.of(store.code(one)).compare() for one in found.ended]
    if others := codes.count("other"):
        found.notes.append(f"{format_count(others, 'trial')} ran other code than this")
    size = sum(path.stat().st_size for path in found.paths if path.exists())
    damaged = [*found.damaged, *_verify_datasets(found)]
    outcomes = _heal(damaged) if options.heal else {}
    left = [item for item in damaged if item.path not in outcomes]
    facts = {
        "trials": found.trials,
        "trainings": found.trainings,
        "files": len(found.paths),
        "bytes": size,
        "damaged": [
            {"path": d.path, "why": d.reason, "healed": outcomes.get(d.path)} for d in damaged
        ],
        "notes": found.notes,
    }
    lines = []
    for item in damaged:
        healed = f"; {outcomes.get(item.path, IN_USE)}" if options.heal else ""
        lines.append(f"{item.path}: {item.reason}{healed}")
    numbers = {"trial": found.trials, "training": found.trainings, "dataset": len(found.datasets)}
    counts = ", ".join(format_count(number, noun) for noun, number in numbers.items())
    read = f"{format_count(len(found.paths), 'file')} read, {format_bytes(size)}"
    lines += [*found.notes, f"{counts}: {read}, {len(damaged) or 'none'} damaged"]
    if left and not options.heal:
        lines.append("`kvlab verify --heal` moves what is damaged aside; submit makes it again")
    print_result(options, facts, "\n".join(lines))
    return int(bool(left))


def _verify_datasets(found: Verification) -> Iterator[Damage]:
    """Read the token files that the trials were trained on, as far as they are on this machine."""
    for folder in dataset_preparation.list_prepared_datasets():
        try:
            if shards.read_manifest(folder)["digest"] not in found.datasets:
                continue
            problems = shards.verify_dataset(folder)
        except DataError as error:
            problems = [str(error)]
        if problems:
            reason = problems[0].partition("; ")[0]
            yield Damage(str(folder), reason, folder, ())


def _heal(damaged: list[Damage]) -> dict[str, str]:
    """Heal what is damaged; return what became of each file that no process uses, in words."""
    outcomes = dict[str, str]()
    for item in damaged:
        if not item.names:  # a prepared text
            aside = dataset_preparation.set_aside_dataset(item.directory)
            healed: list[Damage] | None = [replace(item, aside=aside)] if aside else []
        else:
            healed = heal(item.directory)
        outcomes |= {one.path: f"moved to {one.aside}" for one in healed or ()}
        if healed is not None:
            outcomes.setdefault(item.path, "made again meanwhile")
    return outcomes
