"""`kvlab compare`: compare two sweeps, or one sweep in two stores, cell by cell."""

import argparse
import json

from kvlab.analysis.study import Study
from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.cli.terminal import format_table
from kvlab.errors import UsageError
from kvlab.report.formatting import difference_unit, format_difference, format_metric
from kvlab.report.sweep_comparison import Comparison, Conclusion, compare_sweeps
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
    for study in (before, after):
        if study.search is not None:
            text = f"{study.name} is a search: its trials are suggestions, not cells of a design"
            hint = f"kvlab report {study.name} --confirm FILE"
            raise UsageError(f"{text}; compare sweeps that confirm their best trials ({hint})")
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
        return f"no cell has its {title} in both"
    rows = [["A", "B", f"B - A ({difference_unit(metric)})", _INTERVAL, "seeds", "", "cell"]]
    for cell in comparison.cells:
        rows.append([
            format_metric(metric, cell.before),
            format_metric(metric, cell.after),
            format_difference(metric, cell.difference),
            _format_interval(metric, cell.low, cell.high),
            str(cell.seeds),
            cell.verdict,
            before.label(tuple(cell.levels.values())),
        ])  # fmt: skip
    seeds = "paired by seed" if comparison.is_paired else "of independent seeds"
    return f"{title}, cells that both have, {seeds}:\n{format_table(rows, 'rrrrr')}\n"


_INTERVAL = "simultaneous 95% CI"


def _format_interval(metric: str, low: float, high: float) -> str:
    """Format an interval; empty without one, as of a single seed."""
    if low == high:
        return ""
    return f"{format_difference(metric, low)} to {format_difference(metric, high)}"


def _format_conclusions(comparison: Comparison) -> str:
    conclusions, metric = comparison.conclusions, comparison.metric
    rows = [["about", "A", "B", "B - A", _INTERVAL, "A says", "B says", "B against A"]]
    for one in conclusions:
        values = [one.difference_before, one.difference_after, one.shift]
        if one.is_ranking and not one.changed:
            values = [None] * 3
        texts = ["" if value is None else format_difference(metric, value) for value in values]
        interval = _format_interval(metric, one.low, one.high) if values[2] is not None else ""
        rows.append([one.about, *texts, interval, one.before, one.after, _format_mark(one)])
    effects = [one for one in conclusions if not one.is_ranking]
    rankings = [one for one in conclusions if one.is_ranking]
    moved = [one for one in rankings if one.moved]
    return (
        f"{format_table(rows, 'lrrr')}\n\n"
        f"{sum(one.changed for one in effects)} of {sum(one.compared for one in effects)} effects"
        f" that both estimate changed; {len(moved)} of {len(rankings)} rankings differ,"
        f" {sum(one.changed for one in moved)} of them by more than noise.\n"
        "Changed: the difference of the two estimates is not zero, at 5% for everything that is"
        " compared here together."
    )


def _format_mark(one: Conclusion) -> str:
    if one.changed:
        return "CHANGED"
    if one.is_ranking:
        return "moved, within noise" if one.moved and one.compared else ""
    return one.verdict
