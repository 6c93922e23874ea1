"""`kvlab gc`: show what nothing in the store needs any more; with --apply remove it."""

import argparse
import json
from pathlib import Path

from kvlab.cli.shared_arguments import add_json, add_store
from kvlab.cli.terminal import format_table
from kvlab.humanize import format_bytes
from kvlab.store import Store
from kvlab.store.gc import Garbage, find_garbage, remove_garbage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also final weights that every sweep has measured, which `generate` needs",
    )
    parser.add_argument(
        "--unused", action="store_true", help="also trials and trainings that no sweep contains"
    )
    parser.add_argument(
        "--pruned",
        action="store_true",
        help="also checkpoints of pruned trials; if promoted, these start again from the beginning",
    )
    parser.add_argument(
        "--apply", action="store_true", help="remove it; without this option, only show it"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    garbage = find_garbage(
        Store(options.store),
        weights=options.weights,
        unused=options.unused,
        pruned=options.pruned,
    )
    busy = [item for item in garbage if options.apply and not remove_garbage(item)]
    removable = [item for item in garbage if item not in busy]
    if options.json:
        print(json.dumps(_collect_facts(options, removable, busy), indent=1))
        return 0
    if not garbage:
        print(f"{options.store} holds nothing that could go")
        return 0
    rows = [
        [format_bytes(item.bytes), _relative_path(options, item), item.reason] for item in removable
    ]
    print(format_table([["size", "what", "why"], *rows], right="r"))
    total = format_bytes(sum(item.bytes for item in removable))
    verb = "removed" if options.apply else "could go; add --apply to remove it"
    print(f"\n{total} {verb}")
    if busy:
        print(f"{len(busy)} left, because a process uses them now")
    return 0


def _collect_facts(
    options: argparse.Namespace, removable: list[Garbage], busy: list[Garbage]
) -> dict[str, object]:
    return {
        "applied": options.apply,
        "bytes": sum(item.bytes for item in removable),
        "items": [
            {"path": _relative_path(options, item), "bytes": item.bytes, "why": item.reason}
            for item in removable
        ],
        "in_use": [_relative_path(options, item) for item in busy],
    }


def _relative_path(options: argparse.Namespace, item: Garbage) -> str:
    return str(item.path.relative_to(Path(options.store)))
