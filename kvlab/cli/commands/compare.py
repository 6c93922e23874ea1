"""`kvlab compare`: compare two sweeps, or one sweep in two stores, cell by cell."""

import argparse
import json

from kvlab.analysis.study import Study
from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.cli.terminal import format_table
from kvlab.report.formatting import difference_unit, format_difference, format_metric
from kvlab.report.sweep_comparison import Comparison, compare_sweeps
from kvlab.store import Store
from kvlab.store.metrics import METRICS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="name or file of a submitted sweep")
    parser.add_argument(
        "after", metavar="B", help="name or file of another one, or of the same in --store-b"
    )
    add_store(parser)
    parser.add_argument("--store-b", metavar="DIR", help="store of B (default: that of A)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    before = Study.load(Store(options.store), sweep_name(options.before))
    after = Study.load(Store(options.store_b or options.store), sweep_name(options.after))
    comparison = compare_sweeps(before, after)
    if options.json:
        print(json.dumps(comparison.as_dict(), indent=1))
        return 0
    for warning in comparison.warnings:
        print(f"warning: {warning}")
    print(_format_cells(comparison, before))
    print(f"{comparison.only_before} cells are only in A, {comparison.only_after} only in B")
    print(f"\n{_format_conclusions(comparison)}")
    return 0


def _format_cells(comparison: Comparison, before: Study) -> str:
    metric, title = comparison.metric, METRICS[comparison.metric].title
    if not comparison.cells:
        return f"no cell has its {title} in both at a seed that both have"
    rows = [["A", "B", f"B - A ({difference_unit(metric)})", "95% CI", "seeds", "", "cell"]]
    for cell in comparison.cells:
        low, high = (format_difference(metric, bound) for bound in (cell.low, cell.high))
        rows.append([
            format_metric(metric, cell.before),
            format_metric(metric, cell.after),
            format_difference(metric, cell.difference),
            "" if cell.low == cell.high else f"{low} to {high}",  # no interval of a single seed
            str(cell.seeds),
            cell.verdict,
            before.label(tuple(cell.levels.values())),
        ])  # fmt: skip
    heading = f"{title}, cells that both have, over the seeds that both have:"
    return f"{heading}\n{format_table(rows, 'rrrrr')}\n"


def _format_conclusions(comparison: Comparison) -> str:
    conclusions, metric = comparison.conclusions, comparison.metric
    rows = [["about", "A", "B", "A says", "B says", ""]]
    for conclusion in conclusions:
        values = [conclusion.difference_before, conclusion.difference_after]
        texts = ["" if value is None else format_difference(metric, value) for value in values]
        mark = "CHANGED" if conclusion.changed else "moved" if conclusion.moved else ""
        rows.append([conclusion.about, *texts, conclusion.before, conclusion.after, mark])
    changed = sum(conclusion.changed for conclusion in conclusions)
    concluded = sum(conclusion.concluded for conclusion in conclusions)
    moved = sum(conclusion.moved for conclusion in conclusions)
    ranked = sum(conclusion.by_means for conclusion in conclusions)
    return (
        f"{format_table(rows, 'lrr')}\n\n"
        f"{changed} of {concluded} conclusions that both draw differ;"
        f" {moved} of {ranked} rankings of means moved, as they may by noise alone"
    )
