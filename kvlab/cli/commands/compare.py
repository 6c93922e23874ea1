"""`kvlab compare`: two sweeps, or one sweep of two stores, cell by cell."""

import argparse
import json

from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.cli.terminal import format_table
from kvlab.report.formatting import difference_unit, format_difference, format_metric
from kvlab.report.study import Study
from kvlab.report.sweep_comparison import Comparison, compare_sweeps
from kvlab.store import Store
from kvlab.store.metrics import METRICS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="name or file of a submitted sweep")
    parser.add_argument("after", metavar="B", help="another one, or the same in --store-b")
    add_store(parser)
    parser.add_argument("--store-b", metavar="DIR", help="store of B (default: that of A)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    before = Study.load(Store(options.store), sweep_name(options.before))
    after = Study.load(Store(options.store_b or options.store), sweep_name(options.after))
    found = compare_sweeps(before, after)
    print(
        json.dumps(found.as_dict(), indent=1) if options.json else _format_comparison(found, before)
    )
    return 0


def _format_comparison(found: Comparison, before: Study) -> str:
    metric, unit = found.metric, difference_unit(found.metric)
    lines = [f"warning: {warning}" for warning in found.warnings]
    rows = [["A", "B", f"B - A ({unit})", "95% CI", "seeds", "", "cell"]]
    for cell in found.cells:
        single = cell.low == cell.high
        interval = (
            f"{format_difference(metric, cell.low)} to {format_difference(metric, cell.high)}"
        )
        rows.append(
            [
                format_metric(metric, cell.before),
                format_metric(metric, cell.after),
                format_difference(metric, cell.difference),
                "" if single else interval,
                str(cell.seeds),
                cell.verdict,
                before.label(tuple(cell.levels.values())),
            ]
        )
    if found.cells:
        title = f"{METRICS[metric].title}, cells that both have, over the seeds that both have:"
        lines += [title, format_table(rows, "rrrrr"), ""]
    else:
        lines.append(f"no cell has its {METRICS[metric].title} in both at a seed that both have")
    lines.append(f"{found.only_before} cells are only in A, {found.only_after} only in B")
    heads = [["about", "A", "B", "A says", "B says", ""]]
    for one in found.conclusions:
        values = [one.difference_before, one.difference_after]
        texts = ["" if value is None else format_difference(metric, value) for value in values]
        mark = "CHANGED" if one.changed else "moved" if one.moved else ""
        heads.append([one.about, *texts, one.before, one.after, mark])
    changed = sum(one.changed for one in found.conclusions)
    moved = sum(one.moved for one in found.conclusions)
    ranked = sum(one.by_means for one in found.conclusions)
    both = sum(one.concluded for one in found.conclusions)
    lines += [
        "",
        format_table(heads, "lrr"),
        "",
        f"{changed} of {both} conclusions that both draw differ; {moved} of {ranked} rankings of"
        " means moved, as they may by noise alone",
    ]
    return "\n".join(lines)
