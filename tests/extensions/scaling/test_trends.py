"""Trends of effects over sizes: against numpy and scipy, and covered in synthetic sweeps."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kvlab.analysis.statistics import estimate
from kvlab.analysis.study import Study
from kvlab.extensions.scaling.trends import SizeLaw, list_trends
from tests.report.reading import load, markdown
from tests.support.cells import make_cells, make_study
from tests.support.golden import check_golden
from tests.support.record_factory import SIZES, SizedRecord


def trends_of(folder, **changes):
    study = Study.load(SizedRecord(**changes).write(folder), "made")
    return {trend.level: trend for trend in list_trends(study)}, study


def test_the_trend_is_a_regression_at_every_seed_and_a_t_test_over_seeds(tmp_path):
    trends, study = trends_of(tmp_path)
    trend = trends["mqa"]
    assert trend.sizes == ("small", "middle", "large")
    x = np.log10([SIZES[size] for size in trend.sizes])
    slopes = []
    for seed in trend.seeds:
        differences = [
            np.mean([
                study.cells[size, "mqa", position][seed].measurements["loss_served"]
                - study.cells[size, "mha", position][seed].measurements["loss_served"]
                for position in ("learned", "rope")
            ])
            for size in trend.sizes
        ]  # fmt: skip
        slopes.append(np.polyfit(x, differences, 1)[0])
    assert trend.law.slopes == pytest.approx(slopes)
    expected = stats.ttest_1samp(slopes, 0.0)
    assert trend.slope.p == pytest.approx(expected.pvalue)
    variances = [np.var(one.law.slopes, ddof=1) for one in trends.values()]
    pooled = np.mean(variances) / 4  # both slopes are equally long contrasts of the same trainings
    assert trend.error.value**2 == pytest.approx(max(pooled, variances[0] / 4))
    p = 2 * 2 * stats.t.sf(abs(trend.slope.value) / trend.error.value, trend.error.df)
    assert trend.corrected_p == pytest.approx(p), "two levels are judged"
    reach, middle = stats.t.ppf(1 - 0.05 / 4, trend.error.df) * trend.error.value, trend.slope.value
    assert (trend.low, trend.high) == pytest.approx((middle - reach, middle + reach))
    assert trend.verdict == "falls with size"
    assert trends["rope"].verdict == "no trend shown"
    assert trends["rope"].low < 0 < trends["rope"].high
    # the line is that of least squares, and the miss that of a refit
    rows = np.array(trend.law.differences)
    fits = [np.polyfit(x, row, 1) for row in rows]
    target = 5e7
    values = [np.polyval(fit, np.log10(target)) for fit in fits]
    line = trend.law.line(target)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (line.value, line.low, line.high) == pytest.approx(
        (np.mean(values), expected.low, expected.high)
    )
    residuals = [row - np.polyval(fit, x) for row, fit in zip(rows, fits, strict=True)]
    assert trend.law.residual_variance == pytest.approx(np.square(residuals).sum() / 4)
    misses = [row[-1] - np.polyval(np.polyfit(x[:-1], row[:-1], 1), x[-1]) for row in rows]
    assert trend.miss.value == pytest.approx(np.mean(misses))
    assert trend.miss.p == pytest.approx(stats.ttest_1samp(misses, 0.0).pvalue)


def test_settings_that_are_served_otherwise_enter_no_trend():
    factors = {"model": tuple(SIZES), "heads": ("mha", "mqa"), "sharing": ("none", "tied")}
    noise = np.random.default_rng(3)
    losses = {}
    for number, size in enumerate(SIZES):
        for heads in factors["heads"]:
            common = 4.0 - number + 0.1 * (heads == "mqa") + noise.normal(0, 0.01, 4)
            losses[size, heads, "none"] = common
            losses[size, heads, "tied"] = common + number * (heads == "mqa")
    cells = make_cells(losses, record=lambda _: {"experiment": {"data": {"tokenizer": "gpt2"}}})
    size = {"factor": "model", "parameters": SIZES}
    patches = {"sharing": {"none": {}, "tied": {"serving.tie": "adjacent:2"}}}
    study = make_study(cells, factors, size=size, patches=patches)
    trends = {trend.level: trend for trend in list_trends(study)}
    assert abs(trends["mqa"].value) < 0.05
    assert trends["mqa"].verdict == "no trend shown"


INTERCEPT, SLOPE = 0.08, -0.02


def draw_differences(rng, seed, slope, training, heavy, logs):
    """Return differences at 3 seeds, (seeds, sizes): a line of log10 N, and noise of these spreads."""
    own, slopes = (rng.normal(0, spread, (3, 1)) for spread in (seed, slope))
    lines = own + slopes * (logs - logs[:-1].mean())
    draws = rng.standard_t(4, lines.shape) / 2**0.5 if heavy else rng.normal(size=lines.shape)
    return INTERCEPT + SLOPE * (logs - 6.0) + lines + training * draws


@pytest.mark.parametrize(
    "noise", [(0.01, 0.005, 0.005, False), (0.01, 0.0, 0.01, True)],
    ids=["level x seed x size", "heavy tails"],
)  # fmt: skip
def test_synthetic_laws_are_covered(noise):
    """The slope, the line at ten times the largest size, and the mean of new seeds there."""
    rng, covered = np.random.default_rng([3, 4, 250]), []
    logs = np.array([6.0, 6.5, 7.0, 7.5, 8.5])
    for _ in range(250):
        drawn, new = (draw_differences(rng, *noise, logs) for _ in range(2))
        law = SizeLaw(tuple(10 ** logs[:-1]), tuple(map(tuple, drawn[:, :-1])))
        line, predicted = law.line(10 ** logs[-1]), law.predict(10 ** logs[-1])
        pairs = (
            (estimate(law.slopes), SLOPE),
            (line, INTERCEPT + SLOPE * 2.5),
            (predicted, new[:, -1].mean()),
        )
        covered.append([found.low <= truth <= found.high for found, truth in pairs])
    assert np.mean(covered, axis=0) == pytest.approx((0.945,) * 3, abs=0.04)


def test_nothing_is_predicted_beyond_ten_times_the_largest_size_or_from_one_seed():
    law = SizeLaw((1e6, 3e6, 1e7), ((0.1, 0.09, 0.08), (0.11, 0.08, 0.09)))
    assert law.predict(1e8).parameters == 1e8
    with pytest.raises(ValueError, match="more than 10 times the largest size"):
        law.predict(1.01e8)
    with pytest.raises(ValueError, match="one seed has no spread"):
        SizeLaw((1e6, 3e6, 1e7), ((0.1, 0.09, 0.08),)).predict(2e7)


def is_large_mqa(levels):
    return {"large", "mqa"} <= {*levels.values()}


def lose_large(levels, seed):
    is_lost = is_large_mqa(levels) and levels["position"] == "learned" and seed == 0
    return "diverged" if is_lost else "done"


RECORDS = {
    "sizes": SizedRecord(predict=(3e7, 1e8), noise=0.001),
    "sizes-noisy": SizedRecord(predict=(3e7, 1e8), noise=0.3),
    "sizes-once": SizedRecord(seeds=(0,)),
    "sizes-two": SizedRecord(exclude=is_large_mqa),
    "sizes-diverged": SizedRecord(status=lose_large),
}


@pytest.mark.parametrize("name", list(RECORDS))
def test_the_section_is_the_golden_one(tmp_path, name):
    text = markdown(load(RECORDS[name], tmp_path, "size-trends"))
    check_golden(Path(__file__).parent / "golden" / f"{name}.txt", text)
