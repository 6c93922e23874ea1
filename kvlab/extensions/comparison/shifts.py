"""Shifts: by how much the estimates of two sweeps differ, tested together.

What is tested is the difference of two estimates, never that of two verdicts: one may be just above
a threshold and the other just below. Where the sweeps have seeds in common, trials are paired by
cell and seed, and the differences of trials go through the same estimates as trials do. Else the
estimates are independent (Welch 1947). Everything that is compared is one family, judged by Holm's
method with simultaneous intervals.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.interactions import estimate_interactions
from kvlab.analysis.standard_errors import StandardError, pool_errors
from kvlab.analysis.statistics import estimate
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.analysis.verdicts import judge_family
from kvlab.store.metrics import METRICS

Rows = dict[Levels, dict[int, TrialRow]]


@dataclass(frozen=True)
class Shift:
    """The second sweep's estimate minus the first one's.

    Attributes:
        kind: As of `kvlab.analysis.statistics.Estimate`.
        seeds: Number of seeds: of pairs, or the smaller number of independent ones.
        low: Lower end of the simultaneous interval; 0 where zero itself is excluded.
        high: Upper end; 0 where zero itself is excluded.
        p: p-value, corrected for all shifts that are judged together.
    """

    value: float
    kind: str
    seeds: int
    error: StandardError | None = None
    low: float = 0.0
    high: float = 0.0
    p: float = 1.0

    @property
    def is_found(self) -> bool:
        """Whether the truths behind the two estimates differ."""
        return self.kind == "exact" or (self.kind == "tested" and not self.low < 0 < self.high)


@dataclass(frozen=True)
class SweepShifts:
    """All shifts of a metric between two sweeps.

    Attributes:
        cells: Cell -> shift of its mean.
        against_baseline: Cell -> shift of its difference from the baseline, which ranks it.
        effects: Name of a level or of two levels -> shift of what it does.
    """

    cells: Mapping[Levels, Shift]
    against_baseline: Mapping[Levels, Shift]
    effects: Mapping[str, Shift]
    is_paired: bool


def estimate_shifts(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> SweepShifts:
    """Estimate and judge the shifts between two sweeps.

    Args:
        shared: Cells of the first sweep -> the same cells of the second one.
    """
    seeds = set(before.seeds) & set(after.seeds)
    is_paired = len(seeds) > 1 or min(len(before.seeds), len(after.seeds)) < 2
    estimates = _paired_shifts if is_paired else _independent_shifts
    parts = estimates(before, after, shared, metric)
    judged = iter(_judge([shift for part in parts for shift in part.values()], before.decide.alpha))
    cells, against_baseline = ({c: next(judged) for c in part} for part in parts[:2])
    effects = {name: next(judged) for name in parts[2]}
    return SweepShifts(cells, against_baseline, effects, is_paired)


Parts = tuple[dict[Levels, Shift], dict[Levels, Shift], dict[str, Shift]]


def _judge(shifts: list[Shift], alpha: float) -> list[Shift]:
    family = [number for number, one in enumerate(shifts) if one.error is not None]
    errors = [shift.error for shift in shifts if shift.error is not None]
    found = judge_family([shifts[number].value for number in family], errors, alpha)
    for number, test in zip(family, found, strict=True):
        shifts[number] = replace(shifts[number], low=test.low, high=test.high, p=test.p)
    return shifts


def _paired_shifts(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> Parts:
    """Estimate shifts from the differences of trials of one cell and one seed."""
    rows: Rows = {}
    for levels, other in shared.items():
        for seed, row in before.cells[levels].items():
            partner = after.cells[other].get(seed)
            if partner is not None and all(
                one.is_done and metric in one.measurements for one in (row, partner)
            ):
                one, two = partner.measurements[metric], row.measurements[metric]
                # rounding errors count as zero
                value = 0.0 if abs(one - two) <= 1e-12 * max(abs(one), abs(two)) else one - two
                training = f"{row.training} {partner.training}"
                rows.setdefault(levels, {})[seed] = TrialRow(
                    levels, seed, row.trial, "done", training, {metric: value}
                )
    differences = {
        levels: {seed: row.measurements[metric] for seed, row in by_seed.items()}
        for levels, by_seed in rows.items()
    }
    base = differences.get(before.baseline, {})
    relative = {
        levels: {seed: by_seed[seed] - base[seed] for seed in by_seed.keys() & base.keys()}
        for levels, by_seed in differences.items()
        if levels != before.baseline and by_seed.keys() & base.keys()
    }
    own_ids = {row.training for row in rows.get(before.baseline, {}).values()}
    trained_apart = {
        levels: {levels: 1.0, before.baseline: -1.0}
        for levels in relative
        if own_ids.isdisjoint({row.training for row in rows[levels].values()})
    }
    estimand = before.estimand
    effects = [
        *estimate_main_effects(rows, before.factors, metric, estimand=estimand),
        *estimate_interactions(rows, before.factors, metric, estimand=estimand),
    ]
    return (
        _mean_shifts(differences, {c: {c: 1.0} for c in differences}, differences, metric),
        _mean_shifts(relative, trained_apart, differences, metric),
        _list_effects(effects),
    )


def _mean_shifts(
    rows: Mapping[Levels, Mapping[int, float]],
    weights: Mapping[Levels, Mapping[Levels, float]],
    values: Mapping[Levels, Mapping[int, float]],
    metric: str,
) -> dict[Levels, Shift]:
    """Estimate means over seeds, with pooled errors for those that have weights of trainings."""
    in_steps = METRICS[metric].is_share
    scale = max((abs(v) for row in rows.values() for v in row.values()), default=1.0)
    means = {c: estimate(list(row.values()), scale, in_steps=in_steps) for c, row in rows.items()}
    tested = [levels for levels, one in means.items() if one.kind == "tested"]
    shares = [weights.get(levels, {}) for levels in tested]
    found = pool_errors([rows[levels] for levels in tested], shares, values)
    errors = dict(zip(tested, found, strict=True))
    return {
        c: Shift(one.value, one.kind, len(rows[c]), errors.get(c), one.low, one.high)
        for c, one in means.items()
    }


def _list_effects(effects: Iterable[Effect]) -> dict[str, Shift]:
    """Return the effects that have an estimate by their names, as if each were a shift."""
    found = {}
    for effect in effects:
        if (one := effect.estimate) is not None:
            error = effect.tested_error if effect.is_tested else None
            ends = (one.low, one.high)
            found[effect.name] = Shift(effect.value, one.kind, len(effect.seeds), error, *ends)
    return found


def _independent_shifts(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> Parts:
    """Estimate shifts between sweeps without a seed in common."""

    def difference(study: Study, levels: Levels) -> dict[int, float]:
        base = study.values(study.baseline, metric)
        return {s: v - base[s] for s, v in study.values(levels, metric).items() if s in base}

    def shifts(values: Callable[[Study, Levels], dict[int, float]]) -> dict[Levels, Shift]:
        found = {}
        for levels, other in shared.items():
            samples = values(before, levels), values(after, other)
            if all(samples):
                parts = []
                for by_seed in samples:
                    one = estimate(list(by_seed.values()), max(map(abs, by_seed.values())))
                    error = StandardError(one.standard_error, max(1, len(by_seed) - 1))
                    parts.append(Shift(one.value, one.kind, len(by_seed), error))
                found[levels] = _welch(*parts)
        return found

    cells = shifts(lambda study, levels: study.values(levels, metric))
    relative = shifts(difference)
    relative.pop(before.baseline, None)
    own, others = (
        _list_effects((*study.mean_effects(metric), *study.interactions(metric)))
        for study in (before, after)
    )
    effects = {name: _welch(one, others[name]) for name, one in own.items() if name in others}
    return cells, relative, effects


def _welch(one: Shift, other: Shift) -> Shift:
    """Return the difference of two independent estimates, with Satterthwaite's df."""
    value, seeds = other.value - one.value, min(one.seeds, other.seeds)
    errors = [part.error or StandardError(0.0, 1.0) for part in (one, other)]
    variance = math.fsum(error.value**2 for error in errors)
    if seeds < 2:
        kind = "one seed"
    elif not variance:
        kind = "identical" if value == 0 else "exact"
    else:
        kind = "unvaried" if "unvaried" in (one.kind, other.kind) else "tested"
    if kind != "tested":
        return Shift(value, kind, seeds, None, value, value)
    parts = math.fsum(error.value**4 / error.df for error in errors)
    return Shift(value, kind, seeds, StandardError(math.sqrt(variance), variance**2 / parts))
