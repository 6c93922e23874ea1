"""The numbers of every report's tables of effects and cells follow from its results.csv.

`tests.report.reference_effects` computes them again without kvlab.
"""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from kvlab.report.formatting import difference_unit, short_title
from kvlab.store.metrics import METRICS
from tests.report.reference_effects import Sweep
from tests.report.reference_errors import Difference, judge
from tests.support.extensions import skip_refused

REPORTS = Path(__file__).parents[2] / "reports"
SWEEPS = REPORTS.parent / "sweeps"
NAMES = sorted(path.parent.name for path in REPORTS.glob("*/report.md"))

WITHOUT_EFFECTS = {
    "article-memory": "nothing is trained: the report has sizes and times alone",
    "cost-of-a-token": "nothing is trained: the report has sizes and times alone",
    "equal-memory": "a search by Optuna compares no levels and tests nothing",
}

LOOK_BOUND = 2e-3
"""Bounds of looks are simulated, here and by kvlab: intervals agree to this part of their width."""


def read_table(folder, name):
    """Return a table of a report without the units in its heads; names are text."""
    table = pd.read_csv(folder / "tables" / f"{name}.csv", keep_default_na=False, na_values=[""])
    units = re.compile(r" \((nats[^)]*|points|%)\)$")
    table.columns = [units.sub("", column) for column in table]
    return table


def unit_of(metric):
    """Return what tables multiply a metric by: differences of shares are in points."""
    return 100 if difference_unit(metric) == "points" else 1


def column(table, start):
    """Return the only column whose head begins so."""
    (found,) = (name for name in table.columns if name.startswith(start))
    return table[found]


def assert_number(printed, expected):
    """Compare with what a table prints, in which 12 digits are left."""
    assert printed == pytest.approx(expected, rel=1e-9, abs=1e-11)


def assert_interval(table, row, found: Difference, has_looks, unit=1.0):
    """Compare a simultaneous interval; one that is not printed was not judged."""
    confidence = [name for name in table.columns if name.startswith("simultaneous ")]
    low, high = table.loc[row, confidence]
    if math.isnan(low):
        assert not (found.is_claimed and found.is_tested)
        return
    tolerance = (LOOK_BOUND if has_looks else 1e-8) * (high - low)
    assert low == pytest.approx(unit * found.low, rel=0, abs=tolerance)
    assert high == pytest.approx(unit * found.high, rel=0, abs=tolerance)
    assert (low == 0) == (found.low == 0)
    assert (high == 0) == (found.high == 0)


def check_effects(folder: Path, sweep: Sweep):
    """Compare the table of effects; return the effects."""
    table, effects = read_table(folder, "effects"), sweep.effects(sweep.metric)
    levels = [f"{factor}={level}" for factor, level in zip(table.factor, table.level, strict=True)]
    assert levels == [effect.claim for effect in effects]
    means = {one.claim: one.value for one in sweep.main_effects(sweep.metric)}
    unit = unit_of(sweep.metric)
    for row, effect in enumerate(effects):
        beside = table["beside"][row] if "beside" in table else ""
        expected = ", ".join(f"{factor}={level}" for factor, level in effect.at)
        assert (beside if isinstance(beside, str) else "") == expected
        assert_number(table["difference"][row], unit * effect.value)
        for seed, value in effect.by_seed.items():
            assert_number(table[f"difference at seed {seed}"][row], unit * value)
        if len(effect.settings) > 1:
            ends = min(effect.settings.values()), max(effect.settings.values())
            assert_number(table["over settings low"][row], unit * ends[0])
            assert_number(table["over settings high"][row], unit * ends[1])
        if effect.at and not sweep.looks:
            mean = column(table, "mean over all settings")[row]
            assert_number(mean, unit * means[effect.claim])
        assert_interval(table, row, effect, sweep.looks, unit)
        if not sweep.looks and not math.isnan(table["p (corrected)"][row]):
            assert table["p (corrected)"][row] == pytest.approx(effect.p, rel=1e-6)
    return effects


def check_interactions(folder: Path, sweep: Sweep):
    """Compare the table of interactions, which is ordered by p-value."""
    found = {effect.claim: effect for effect in sweep.interactions(sweep.metric)}
    if not (folder / "tables" / "interactions.csv").exists():
        assert not found
        return
    table = read_table(folder, "interactions")
    assert len(table) == min(len(found), 60)
    for row, name in enumerate(table["levels together"]):
        levels, _, against = name.removesuffix(")").partition(" (against ")
        effect = found[levels.replace(" + ", " and ")]
        base = [f"{factor}={level}" for factor, level in sweep.other_base(effect.change).items()]
        assert against == "".join(base)
        assert_number(table["beyond the sum"][row], unit_of(sweep.metric) * effect.value)
        assert_interval(table, row, effect, has_looks=False, unit=unit_of(sweep.metric))


def check_other_measurements(folder: Path, sweep: Sweep):
    """Compare the effects on other metrics, which are judged as one family.

    A sweep whose loss has no serving gap, and whose times do not compare, has none.
    """
    if not (folder / "tables" / "effects-other.csv").exists():
        return
    table = read_table(folder, "effects-other")
    # a paired metric is the one-shot one of the served text, with the same title
    known = [m for m in METRICS if f"measured.{m}" in sweep.results and not m.endswith("_paired")]
    metrics = {(short_title(metric), difference_unit(metric)): metric for metric in known}
    units = table["unit"].fillna("")
    named = [metrics[title, unit] for title, unit in zip(table.measurement, units, strict=True)]
    found = [one for metric in dict.fromkeys(named) for one in sweep.effects(metric)]
    effects = judge(found, sweep.alpha, None)
    assert len(table) == len(effects)
    for row, effect in enumerate(effects):
        place = ", ".join(f"{factor}={level}" for factor, level in effect.at)
        level = effect.change[0][1] + (f" at {place}" if place else "")
        assert (effect.metric, level) == (named[row], str(table.level[row]))
        unit = unit_of(effect.metric)
        assert_number(table["difference"][row], unit * effect.value)
        assert_interval(table, row, effect, has_looks=False, unit=unit)


def check_cells(folder: Path, sweep: Sweep, effects):
    """Compare every cell's mean, and its difference from its reference."""
    table, values = read_table(folder, "cells"), sweep.values(sweep.metric)
    differences = sweep.cell_differences(effects)
    columns = [table[factor].astype(str) for factor in sweep.factors]
    assert list(zip(*columns, strict=True)) == list(values)
    measured, unit = short_title(sweep.metric), unit_of(sweep.metric)
    for row, (cell, by_seed) in enumerate(values.items()):
        own = pd.Series(by_seed)
        assert table["n"][row] == len(own)
        assert_number(table[measured][row], unit * own.mean())
        if len(own) > 1:
            assert_number(table[f"{measured} sd"][row], unit * own.std())
        if cell not in differences:
            assert math.isnan(column(table, "against ")[row])
            continue
        assert_number(column(table, "against ")[row], unit * differences[cell].value)
        assert_interval(table, row, differences[cell], sweep.looks, unit)
        if "compared with" in table:
            assert table["compared with"][row] == name_cell(sweep, sweep.reference(cell))
    by_name = {name_cell(sweep, cell): cell for cell in values}
    has_front = any(sweep.reference(cell) != cell for cell in values)
    assert (folder / "tables" / "pareto.csv").exists() == has_front
    for name in ("ablation", "pareto") if has_front else ("ablation",):
        part = read_table(folder, name)
        assert set(part["cell"]) <= set(by_name)
        for row, cell in enumerate(map(by_name.get, part["cell"])):
            if name == "ablation":  # the front has the means by which cells are ranked
                assert_number(part[measured][row], unit * pd.Series(values[cell]).mean())
            if cell in differences:
                assert_number(column(part, "against ")[row], unit * differences[cell].value)
                assert_interval(part, row, differences[cell], sweep.looks, unit)


def check_gaps(folder: Path, sweep: Sweep):
    """Compare the serving gaps beyond rounding."""
    if not (folder / "tables" / "serving-gap.csv").exists():
        return
    table = read_table(folder, "serving-gap")
    gaps = {cell: gap for cell, gap in sweep.gaps().items() if abs(gap.value) >= 1e-4}
    assert list(table["cell"]) == [name_cell(sweep, cell) for cell in gaps]
    for row, gap in enumerate(gaps.values()):
        assert_number(table["gap"][row], gap.value)
        assert_interval(table, row, gap, has_looks=sweep.looks is not None)


def check_recall(folder: Path, sweep: Sweep):
    """Compare the share of right answers of each cell, of all and by tokens back."""
    if not (folder / "tables" / "recall-back.csv").exists():
        return
    table = read_table(folder, "recall-back")
    groups = [name for name in table if name not in ("cell", "scored") and "sd" not in name]
    rows = table.set_index(["cell", "scored"])
    assert len(rows) == 2 * len(sweep.cells)
    for group in groups:
        name = "recall" if group == "all" else f"recall_{re.findall('[0-9]+', group)[-1]}_back"
        for scored, metric in (("one-shot", name), ("served", f"{name}_served")):
            for cell, by_seed in sweep.values(metric).items():
                own = 100 * pd.Series(by_seed)
                printed = rows.loc[(name_cell(sweep, cell), scored)]
                assert_number(printed[group], own.mean())
                assert_number(printed[f"{group} sd"], own.std())


def name_cell(sweep: Sweep, cell):
    """Return the name by which tables call a cell: its levels that are not the baseline's."""
    every = [level for levels in sweep.factors.values() for level in levels]
    named = zip(sweep.factors, cell, sweep.baseline, strict=True)
    changed = [(factor, level) for factor, level, base in named if level != base]
    changed = [f"{f}={level}" if every.count(level) > 1 else level for f, level in changed]
    return "+".join(changed) or "baseline"


def check_report(folder: Path):
    """Compare a report's tables with what results.csv beside them says."""
    sweep = Sweep.read(folder)
    assert set(sweep.results["status"]) == {"done"}, "the reference leaves no trial out"
    effects = check_effects(folder, sweep)
    check_interactions(folder, sweep)
    check_other_measurements(folder, sweep)
    check_cells(folder, sweep, effects)
    check_gaps(folder, sweep)
    check_recall(folder, sweep)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_EFFECTS])
def test_the_tables_follow_from_results(name):
    skip_refused(SWEEPS / f"{name}.yaml")
    experiments = REPORTS.parent / "experiments"
    METRICS.offer(path.read_text() for path in sorted(experiments.glob("*.py")))
    check_report(REPORTS / name)


def test_every_report_with_effects_is_compared():
    with_effects = {name for name in NAMES if (REPORTS / name / "tables" / "effects.csv").exists()}
    assert set(NAMES) - with_effects == set(WITHOUT_EFFECTS)
    assert with_effects
