"""Effects and cells: by plain loops from the losses alone, and their verdicts."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis.study import Study
from tests.analysis.test_estimand import CELLS, tied_study
from tests.report.reference_effects import Sweep
from tests.support.cells import FACTORS

SEEDS = 4
REFERENCES = {cell: ("mha", cell[1], "none") for cell in CELLS}
COMPARED = [cell for cell in CELLS if cell != REFERENCES[cell]]


def with_losses(study, changed):
    """The same study with other losses at every seed."""
    rows = [
        replace(row, measurements={"loss_served": float(changed[row.levels][row.seed])})
        for row in study.rows
    ]
    return Study(study.store, study.sweep, rows)


def noisy_study(seed, together=0.3, **options):
    """A study in which one K/V head costs 0.3 nats, and each tied cell has a noise of its own."""
    study = tied_study(seeds=SEEDS, **options)
    random = np.random.default_rng(seed)
    trained = {cell: random.normal(0, 0.02, SEEDS) for cell in CELLS if cell[2] != "tied"}
    shared, table = random.normal(0, together, SEEDS), {}
    for cell in CELLS:
        weights = (*cell[:2], "none" if cell[2] == "tied" else cell[2])
        table[cell] = 4 + shared + trained[weights] + 0.3 * (cell[0] == "mqa")
        if cell[2] == "tied":
            table[cell] = table[cell] + random.normal(0.1, 0.2, SEEDS)
    return with_losses(study, table)


def make_reference(study):
    """Return what `tests.report.reference_effects` would read of a study's results."""
    rows = [
        dict(zip((f"factor.{name}" for name in FACTORS), row.levels, strict=True))
        | {"seed": row.seed, "training": row.training}
        | {"measured.loss_served": row.measurements["loss_served"]}
        | {"kv.bytes_at_block_size": row.record["kv"]["bytes_at_block_size"]}
        for row in study.rows
    ]
    decide = {"metric": "loss_served", "alpha": 0.05, "margin": None, "claims": None}
    decide |= study.sweep["decide"]
    return Sweep(pd.DataFrame(rows), {**study.sweep, "decide": decide})


def assert_equal(found, expected):
    assert found.value == pytest.approx(expected.value)
    if math.isnan(expected.low) or not expected.is_claimed:
        assert not found.has_interval
        return
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found.corrected_p == pytest.approx(expected.p, rel=1e-6)


@pytest.mark.parametrize("together", [0.3, 0.0])
@pytest.mark.parametrize(
    "decide",
    [{}, {"margin": 0.05}, {"alpha": 0.2, "claims": ["heads=mqa"]}, {"reference": ["heads"]},
     {"over": {"sharing": ["none", "tied"]}}],
)  # fmt: skip
def test_against_a_plain_reference(decide, together):
    """Where seeds have something in common, and where trainings are alone."""
    for seed in range(3):
        study = noisy_study(seed, together, decide=decide)
        reference = make_reference(study)
        expected = reference.effects("loss_served")
        effects = study.effects("loss_served")
        assert [(one.claim, one.at) for one in effects] == [(one.claim, one.at) for one in expected]
        for found, other in zip(effects, expected, strict=True):
            assert_equal(found, other)
        pairs = {one.claim: one for one in reference.interactions("loss_served")}
        for found in study.interactions("loss_served"):
            assert_equal(found, pairs.pop(found.claim))
        assert pairs == {}
        cells = reference.cell_differences(expected)
        assert [*study.comparisons] == [*cells]
        for cell, found in study.comparisons.items():
            assert found.reference == reference.reference(cell)
            assert found.value == pytest.approx(cells[cell].value)
            assert found.token_factor == (1.0 if cell[0] == found.reference[0] else 1.5)
            low_high = cells[cell].low, cells[cell].high
            assert (found.low, found.high) == pytest.approx(low_high, abs=1e-12)
