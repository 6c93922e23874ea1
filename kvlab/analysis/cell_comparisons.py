"""Every cell against its reference, judged together.

`kvlab.analysis.estimand` says what a cell's reference is, and `kvlab.analysis.rankings` estimates
differences. Intervals and verdicts are those of the effects: Holm's method and simultaneous
intervals, over all cells. A cell whose difference is what a level does has the interval and the
verdict of that effect: one comparison, one verdict. Where claims are tested while seeds are added,
every interval has the part of the error that the tests so far may spend.

A *serving gap* is the loss through the serving cache minus the one-shot loss of the same weights.
It is measured on one training's weights, so the training is the unit, and every cell has an error
of its own: caches differ in their spread by orders of magnitude. Intervals hold for all cells
together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlab.analysis.effects import Effect
from kvlab.analysis.statistics import Estimate, estimate
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import judge_family, judge_interval, write_verdict
from kvlab.store.metrics import METRICS

if TYPE_CHECKING:
    from kvlab.analysis.sequential import SequentialTests
    from kvlab.analysis.study import Study


@dataclass(frozen=True)
class CellComparison:
    """A cell minus its reference, in the decided metric ``metric``.

    Attributes:
        estimate: The difference; its ends are those of the simultaneous interval.
        verdict_name: Name of the verdict in `kvlab.analysis.verdicts.VERDICTS`.
        margin: A cost that does not matter, in the metric's unit; None without one.
        effect: The effect that the comparison is, if it is one.
        later: The difference over all seeds, where the verdict is that of an earlier test.

        token_factor: The cell's training tokens divided by the reference's; None if unknown.
    """

    levels: Levels
    reference: Levels
    estimate: Estimate
    seeds: tuple[int, ...]
    verdict_name: str
    metric: str
    margin: float | None = None
    effect: Effect | None = None
    later: Estimate | None = None
    token_factor: float | None = None

    @property
    def value(self) -> float:
        return self.estimate.value

    @property
    def low(self) -> float:
        return self.estimate.low

    @property
    def high(self) -> float:
        return self.estimate.high

    @property
    def weights(self) -> dict[Levels, float]:
        """Weight of both cells in the difference."""
        return {self.levels: 1.0, self.reference: -1.0}

    @property
    def has_interval(self) -> bool:
        """Whether the simultaneous interval holds: the difference was tested, and fairly."""
        if self.effect is not None:
            return self.effect.has_interval
        return self.estimate.kind == "tested" and self.verdict_name not in ("diverged", "disturbed")

    @property
    def verdict(self) -> str:
        """The words of the verdict; empty if there is none."""
        return write_verdict(self.verdict_name, self.margin, self.metric)


def compare_cells(study: "Study") -> dict[Levels, CellComparison]:
    """Compare every cell with its reference, in the primary metric.

    Returns:
        Cell -> comparison, without references themselves and cells without a seed in common.
    """
    ranking, metric = study.ranking(study.primary_metric), study.primary_metric
    found: dict[Levels, CellComparison] = {}
    for levels in study.cells:
        reference = study.estimand.reference(levels)
        difference = ranking.difference(levels, reference) if levels != reference else None
        if difference is None:
            continue
        shared = study.values(levels, metric).keys() & study.values(reference, metric).keys()
        tokens = study.trained_tokens(levels), study.trained_tokens(reference)
        found[levels] = CellComparison(
            levels,
            reference,
            difference,
            tuple(sorted(shared)),
            "",
            metric,
            study.decide.margin,
            token_factor=tokens[0] / tokens[1] if tokens[0] and tokens[1] else None,
        )
    judged = _judge_together(study, found)
    for effect in study.effects(metric):
        cell = next((levels for levels, weight in effect.weights.items() if weight > 0), None)
        one = judged.get(cell) if cell is not None and effect.is_claimed else None
        if one is not None and effect.weights == one.weights:
            judged[one.levels] = _with_effect(one, effect)
    return judged


def _judge_together(
    study: "Study", comparisons: Mapping[Levels, CellComparison]
) -> dict[Levels, CellComparison]:
    """Give all comparisons intervals that hold together, and verdicts."""
    alpha, margin = study.decide.alpha, study.decide.margin
    tested = [one for one in comparisons.values() if one.estimate.kind == "tested"]
    values, errors = [one.value for one in tested], [one.estimate.error for one in tested]
    shares = _share_alpha(alpha, study.tests, [len(c.seeds) for c in tested], len(tested))
    judgements = judge_family(values, errors, alpha, margin, shares)
    judged = dict(comparisons)
    for one, test in zip(tested, judgements, strict=True):
        reach = 1.0 if METRICS[one.metric].items else math.inf  # of a share of items
        low, high = max(test.low, -reach), min(test.high, reach)
        within = replace(one.estimate, low=low, high=high, p=test.p)
        judged[one.levels] = replace(one, estimate=within)
    return {c: replace(one, verdict_name=_name_verdict(study, one)) for c, one in judged.items()}


def _name_verdict(study: "Study", comparison: CellComparison) -> str:
    metric, found = study.primary_metric, comparison.estimate
    cells = (comparison.levels, comparison.reference)
    if any(levels in study.diverged_cells for levels in cells):
        return "diverged" if cells[0] in study.diverged_cells else "baseline diverged"
    if found.kind in ("one seed", "unvaried", "identical"):
        return found.kind
    if study.is_disturbed(metric):
        return "disturbed"
    better, margin = METRICS[metric].better, study.decide.margin
    return judge_interval(found.low, found.high, better, margin, study.count_wrong(cells))


def _with_effect(comparison: CellComparison, effect: Effect) -> CellComparison:
    """Return a comparison with the numbers and the verdict of the effect that it is."""
    assert effect.estimate is not None, "it has the weights of a comparison"
    own = replace(effect.estimate, value=effect.value)
    if effect.has_interval:
        error = effect.tested_error
        low, high, p = effect.low, effect.high, effect.corrected_p
        own = Estimate(effect.value, "tested", error.value, error.df, low, high, p)
    return replace(
        comparison,
        estimate=own,
        seeds=effect.seeds,
        verdict_name=effect.verdict_name,
        effect=effect,
        later=comparison.estimate if comparison.seeds != effect.seeds else None,
    )


def _share_alpha(
    alpha: float, tests: "SequentialTests | None", counts: Iterable[int], n_tested: int
) -> list[float]:
    """Return each difference's part of alpha by its seeds; with looks, of what they may spend."""
    spent = [1.0 if tests is None else tests.spent_share(n, alpha) for n in counts]
    return [share / max(1, n_tested) for share in spent]


# Serving gaps


def judge_gaps(
    rows: Sequence[Mapping[int, float]],
    alpha: float,
    rounding: float,
    tests: "SequentialTests | None" = None,
) -> list[Estimate]:
    """Test the gaps of several cells together.

    Args:
        rows: Gaps by seed, at least one for each cell.
        alpha: Probability of any false claim.
        rounding: Size of a gap that is rounding. A cell without a larger one is not tested.
        tests: Of a sweep with looks.

    Returns:
        Each cell's mean. A tested one has the simultaneous interval, and its p-value is corrected
        for all cells.
    """
    gaps = []
    for row in rows:
        gap, is_rounding = estimate(list(row.values())), max(map(abs, row.values())) < rounding
        gaps.append(replace(gap, kind="identical") if is_rounding else gap)
    values, errors = [gap.value for gap in gaps], [gap.error for gap in gaps]
    n_tested = sum(error is not None for error in errors)
    shares = _share_alpha(alpha, tests, map(len, rows), n_tested)
    pairs = zip(gaps, judge_family(values, errors, alpha, None, shares), strict=True)
    return [replace(gap, low=test.low, high=test.high, p=test.p) for gap, test in pairs]
