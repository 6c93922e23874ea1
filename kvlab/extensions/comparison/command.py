"""`kvlab compare`: compare two sweeps cell by cell, or two records of one trial."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.cli.shared_arguments import add_flag, add_record, open_store, sweep_name
from kvlab.cli.terminal import format_table, print_result
from kvlab.errors import UsageError
from kvlab.extensions.comparison import records
from kvlab.extensions.comparison.records import RecordComparison, TrialRecord
from kvlab.extensions.comparison.sweeps import Comparison, compare_sweeps
from kvlab.humanize import sanitize_line
from kvlab.report import formatting as fmt
from kvlab.store import Store, record_forms
from kvlab.store.metrics import METRICS

EPILOG = """\
With --trials, A and B are two records of one trial, such as from two machines. Name each by its id
(or its first digits) in --store and --store-b, as STORE:ID, or by its folder. The records agree if
counts are equal, losses differ by at most 0.002 nats/token or 0.003 bits/byte, and shares by at
most 0.01. Where serving changes what a model computes, as with a tied cache, losses through the
cache may differ by 1% of the serving gap more. Times are not compared. The exit code is 1 if the
records disagree.

examples:
  kvlab compare quickstart quickstart --store-b old-runs
  kvlab compare --trials runs:3f2a other/runs:3f2a
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="name or file of a submitted sweep, or a trial")
    parser.add_argument("after", metavar="B", help="another one, or the same in --store-b")
    add_flag(parser, "--trials", "A and B are trials")
    add_record(parser, archive=True)
    parser.add_argument("--store-b", metavar="DIR", help="store of B (default: that of A)")


def run(options: argparse.Namespace) -> int:
    if options.trials:
        one = _read_trial(options.before, options.store)
        other = _read_trial(options.after, options.store_b or options.store)
        folder = one.store.trial_directory(one.trial)
        if folder.samefile(other.store.trial_directory(other.trial)):
            hint = "name the store of the other with --store-b or STORE:ID"
            raise UsageError(f"A and B are one record, {folder}; {hint}")
        found = records.compare_records(one, other)
        print_result(options, found.as_dict(), "\n".join(_format_records(one, other, found)))
        return int(not found.agrees)
    before = Study.load(open_store(options.store), sweep_name(options.before))
    after = Study.load(open_store(options.store_b or options.store), sweep_name(options.after))
    for study in (before, after):
        if study.search is not None:
            text = f"{study.name} is a search: its trials are suggestions, not cells of a design"
            hint = f"kvlab report {study.name} --confirm FILE"
            raise UsageError(f"{text}; compare sweeps that confirm their best trials ({hint})")
    with record_forms.refuse_malformed(f"{before.name} or {after.name}"):
        comparison = compare_sweeps(before, after)
    lines = [
        *(f"warning: {warning}" for warning in comparison.warnings),
        _format_cells(comparison, before),
        f"{comparison.only_before} cells are only in A, {comparison.only_after} only in B",
        f"\n{_format_conclusions(comparison)}",
    ]
    print_result(options, asdict(comparison), "\n".join(lines))
    return 0


def _format_cells(comparison: Comparison, before: Study) -> str:
    metric, title = comparison.metric, METRICS[comparison.metric].title
    if not comparison.cells:
        return f"no cell has its {title} in both"
    difference, interval = f"B - A ({fmt.difference_unit(metric)})", _name_interval(comparison)
    rows = [["A", "B", difference, interval, "seeds", "", "cell"]]
    for cell in comparison.cells:
        rows.append([
            fmt.format_metric(metric, cell.before),
            fmt.format_metric(metric, cell.after),
            fmt.format_difference(metric, cell.difference),
            "" if cell.low == cell.high else fmt.format_interval(metric, cell.low, cell.high),
            str(cell.seeds),
            cell.verdict,
            before.label(tuple(cell.levels.values())),
        ])  # fmt: skip
    seeds = "paired by seed" if comparison.is_paired else "of independent seeds"
    return f"{title}, cells that both have, {seeds}:\n{format_table(rows, 'rrrrr')}\n"


def _format_conclusions(comparison: Comparison) -> str:
    conclusions, metric = comparison.conclusions, comparison.metric
    interval = _name_interval(comparison)
    rows = [["about", "A", "B", "B - A", interval, "A says", "B says", "B against A"]]
    for one in conclusions:
        values = one.difference_before, one.difference_after, one.shift
        texts = ["" if value is None else fmt.format_difference(metric, value) for value in values]
        interval = ""  # as of a single seed
        if one.shift is not None and one.low != one.high:
            interval = fmt.format_interval(metric, one.low, one.high)
        mark = "CHANGED" if one.verdict == "changed" else one.verdict
        rows.append([one.about, *texts, interval, one.before, one.after, mark])
    return (
        f"{format_table(rows, 'lrrr')}\n\n"
        f"{sum(one.verdict == 'changed' for one in conclusions)} of"
        f" {sum(one.compared for one in conclusions)} effects that both estimate changed.\n"
        f"Changed: the difference of the two estimates is not zero, at {100 * comparison.alpha:g}%"
        " for everything that is compared here together."
    )


def _name_interval(comparison: Comparison) -> str:
    return f"simultaneous {fmt.format_confidence(comparison.alpha)} CI"


# Two records of a trial


def _read_trial(text: str, store: str) -> TrialRecord:
    """Read a trial that is given by its folder, as STORE:ID, or by its id in ``store``."""
    folder = Path(text).resolve()
    if (folder / "result.json").is_file() and folder.parent.name == "trials":
        return TrialRecord.read(Store(folder.parent.parent), folder.name)
    place, colon, trial = text.rpartition(":")
    found = open_store(place if colon else store)
    return TrialRecord.read(found, found.find_trial(trial))


def _format_records(one: TrialRecord, other: TrialRecord, found: RecordComparison) -> Iterator[str]:
    yield f"A: trial {one.trial} in {one.store.path}"
    yield f"B: trial {other.trial} in {other.store.path}"
    tables = {"configuration": found.configuration, "code, machine and time": found.environment}
    if found.is_one_trial:
        tables["sizes and counts, which must agree"] = found.exact
    for title, fields in tables.items():
        yield ""
        if fields:
            rows = [[f.name, _format_value(f.before), _format_value(f.after)] for f in fields]
            yield format_table([[title, "A", "B"], *rows])
        else:
            yield f"{title}: no field differs"
    yield ""
    differ = [one.name for one in found.configuration]
    if found.is_one_trial:
        differ = [*(one.name for one in found.exact), *(one.name for one in found.beyond)]
    names = ", ".join(differ[:8]) + (", ..." if len(differ) > 8 else "")
    if not found.is_one_trial:
        yield f"verdict: two trials, which differ in {names or 'the version of kvlab'}"
        return
    yield from _format_results(found)
    state = "agree" if found.agrees else f"DISAGREE in {names}"
    counts = f"{found.count('equal')} measurements equal, {found.count('within')} within the"
    counts += f" tolerance, {len(found.beyond) or 'none'} beyond it"
    yield f"verdict: one trial, and the records {state}: {counts}"


def _format_value(value: Any) -> str:
    return records.NOT_RECORDED if value is None else sanitize_line(str(value))


def _format_results(found: RecordComparison) -> Iterator[str]:
    rows = [["measurement", "A", "B", "B - A", "accepted", ""]]
    machine = [["of the machine, not compared", "A", "B", "B / A"]]
    for one in sorted(found.metrics, key=lambda one: one.verdict):
        before, after = ("" if x is None else f"{x:.8g}" for x in (one.before, one.after))
        difference = ratio = ""
        if one.before is not None and one.after is not None:
            difference = f"{one.after - one.before:+.2g}"
            ratio = f"{one.after / one.before:.3g}" if one.before else ""
        accepted = "" if one.tolerance is None else f"{one.tolerance:.3g}"
        if one.verdict == "not compared":
            machine.append([one.name, before, after, ratio])
        elif one.verdict != "equal":
            rows.append([one.name, before, after, difference, accepted, one.verdict])
    if len(rows) > 1:
        yield format_table(rows, "lrrrr")
    yield f"{found.count('equal')} of {len(found.metrics)} measurements are equal"
    if len(machine) > 1:
        yield f"\n{format_table(machine, 'lrrr')}"
    for words, is_same in (("the same", True), ("other", False)):
        names = [name for name, one in found.files.items() if one == is_same]
        if names:
            yield f"files with {words} bytes: {', '.join(names)}"
    yield ""
