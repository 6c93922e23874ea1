"""Serving gaps: t intervals of each cell's own gaps, corrected for all cells."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvlab.analysis.serving_gaps import judge_gaps

ROUNDING = 1e-4


def by_seed(*values):
    return dict(enumerate(values))


def test_against_scipy_and_statsmodels():
    random = np.random.default_rng(1)
    rows = [
        by_seed(*random.normal(mean, 0.02, size)) for mean, size in ((0.3, 5), (0.02, 4), (0, 7))
    ]
    found = judge_gaps(rows, 0.05, ROUNDING)
    own = [stats.ttest_1samp(list(row.values()), 0.0) for row in rows]
    corrected = multipletests([one.pvalue for one in own], method="holm")[1]
    assert [gap.p for gap in found] == pytest.approx(corrected.tolist(), rel=1e-9)
    for gap, row, test in zip(found, rows, own, strict=True):
        assert gap.value == pytest.approx(np.mean(list(row.values())))
        assert (gap.smallest, gap.largest) == (min(row.values()), max(row.values()))
        assert gap.trainings == len(row)
        assert gap.is_found == (gap.p <= 0.05)
        low, high = test.confidence_interval(1 - 0.05 / 3)
        assert gap.interval[0] in (0.0, pytest.approx(low))
        assert gap.interval[1] in (0.0, pytest.approx(high))
    assert found[0].is_found


def test_a_large_gap_is_found_at_five_trainings():
    """Sign flips called nothing below six."""
    gap, *_ = judge_gaps(
        [by_seed(1.30, 1.52, 1.21, 1.44, 1.33)] + [by_seed(0.0, 0.0)] * 9, 0.05, ROUNDING
    )
    assert gap.is_found
    assert gap.interval[0] > 1.0


def test_rounding_and_single_trainings_are_not_tested():
    rows = [by_seed(3e-5, 5e-5, 4e-5), by_seed(1.4), by_seed(0.01, 0.011, 0.012)]
    rounding, single, real = judge_gaps(rows, 0.05, ROUNDING)
    assert (rounding.interval, rounding.p, rounding.is_found) == (None, 1.0, False)
    assert (single.interval, single.p, single.is_found) == (None, 1.0, False)
    alone = stats.ttest_1samp([0.01, 0.011, 0.012], 0.0)
    assert real.p == pytest.approx(alone.pvalue), "what is not tested costs the others nothing"


def test_gaps_around_zero_are_called_rarely():
    """Normal, of spreads that differ by a hundred, correlated: of 1,000 sweeps 5% are 50."""
    random, wrong = np.random.default_rng(5), 0
    spreads = np.geomspace(0.001, 0.1, 5)[:, None]
    for _ in range(1000):
        gaps = spreads * (random.normal(size=(5, 4)) + random.normal(size=4))
        found = judge_gaps([by_seed(*row) for row in gaps], 0.05, 0.0)
        wrong += any(gap.is_found for gap in found)
    assert wrong <= 64  # two standard errors above 50
