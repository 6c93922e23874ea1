"""`kvlab gc`: show what nothing in the store needs any more; with --apply remove it."""

import argparse

from kvlab.cli.shared_arguments import add_flag, add_record
from kvlab.cli.terminal import format_table, print_result
from kvlab.extensions.gc.garbage import Garbage, find_garbage, remove_garbage
from kvlab.humanize import format_bytes
from kvlab.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser)
    add_flag(parser, "--weights", "also final weights that all sweeps have measured")
    add_flag(parser, "--unused", "also trials and trainings that no sweep contains")
    add_flag(parser, "--pruned", "also checkpoints of pruned trials, which --promote needs")
    add_flag(parser, "--apply", "remove it; without this option, only show it")


def run(options: argparse.Namespace) -> None:
    def show(item: Garbage) -> str:
        return str(item.path.relative_to(options.store))

    garbage = find_garbage(
        Store(options.store), weights=options.weights, unused=options.unused, pruned=options.pruned
    )
    busy = [item for item in garbage if options.apply and not remove_garbage(item)]
    removable = [item for item in garbage if item not in busy]
    total = sum(item.bytes for item in removable)
    facts = {
        "applied": options.apply,
        "bytes": total,
        "items": [{"path": show(i), "bytes": i.bytes, "why": i.reason} for i in removable],
        "in_use": list(map(show, busy)),
    }
    rows = [[format_bytes(item.bytes), show(item), item.reason] for item in removable]
    verb = "removed" if options.apply else "could go; add --apply to remove it"
    lines = [format_table([["size", "what", "why"], *rows], right="r"), ""]
    lines.append(f"{format_bytes(total)} {verb}")
    if busy:
        lines.append(f"{len(busy)} left, because a process uses them now")
    empty = f"{options.store} holds nothing that could go"
    print_result(options, facts, "\n".join(lines) if garbage else empty)
