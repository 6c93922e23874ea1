"""Compare two sweeps, or two records of one sweep: their cells and what their levels do.

What is tested is the difference of two estimates, a *shift*, never that of two verdicts: one may be
just above a threshold and the other just below. Where the sweeps have seeds in common, trials are
paired by cell and seed, and the differences of trials go through the same estimates as trials do.
Else the estimates are independent (Welch 1947). Everything that is compared is one family, judged
by Holm's method with simultaneous intervals.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.interactions import estimate_interactions
from kvlab.analysis.standard_errors import StandardError, pool_errors
from kvlab.analysis.statistics import estimate
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.analysis.verdicts import VERDICTS, judge_family
from kvlab.report.formatting import format_settings
from kvlab.report.record_warnings import count_values
from kvlab.store.metrics import METRICS


@dataclass(frozen=True)
class CellChange:
    """A cell that both sweeps have.

    Attributes:
        before: Mean in the first sweep; of paired trials, over the seeds that both have.
        after: Mean in the second sweep, over the same seeds.
        low: Lower end of the interval of the difference, simultaneous for all that is compared.
    """

    levels: dict[str, str]
    before: float
    after: float
    difference: float
    low: float
    high: float
    seeds: int
    verdict: str


@dataclass(frozen=True)
class Conclusion:
    """What each sweep concludes about a level, or about two levels together.

    Attributes:
        difference_before: The difference behind it, if there is one.
        difference_after: The same of the second sweep.
        shift: The second difference minus the first; None if it cannot be estimated.
        low: Lower end of the simultaneous interval of the shift.
        verdict: ``changed``, ``within noise``, ``identical`` or why nothing is tested.
    """

    about: str
    before: str
    after: str
    difference_before: float | None
    difference_after: float | None
    shift: float | None
    low: float
    high: float
    verdict: str

    @property
    def compared(self) -> bool:
        """Whether the difference of the two was tested, or needs no test."""
        return self.verdict in ("changed", "within noise", "identical")


@dataclass(frozen=True)
class Comparison:
    """The second sweep against the first.

    Attributes:
        alpha: Probability of any wrong statement, that of the first sweep.
        is_paired: Whether trials were paired by seed; else the seeds are independent.
        warnings: Other differences, possible causes.
    """

    metric: str
    alpha: float
    is_paired: bool
    cells: tuple[CellChange, ...]
    only_before: int
    only_after: int
    conclusions: tuple[Conclusion, ...]
    warnings: tuple[str, ...]


def compare_sweeps(before: Study, after: Study) -> Comparison:
    """Compare two studies, whose cells are joined by their levels.

    A factor that only one of them has is at its baseline level in the other. At most a share alpha
    of comparisons of equal truths calls anything changed.
    """
    metric = before.primary_metric
    common = before.factors.keys() & after.factors.keys()
    names, others = (
        {_name_cell(study, levels, common): levels for levels in study.cells}
        for study in (before, after)
    )
    shared = {levels: others[name] for name, levels in names.items() if name in others}
    of_cells, of_effects, is_paired = estimate_shifts(before, after, shared, metric)
    cells = []
    for levels, shift in of_cells.items():
        own, theirs = before.values(levels, metric), after.values(shared[levels], metric)
        used = [value for seed, value in own.items() if seed in theirs or not is_paired]
        mean = math.fsum(used) / len(used)
        named = dict(zip(before.factors, levels, strict=True))
        found = (shift.value, shift.low, shift.high, shift.seeds, _verdict(shift, "differs"))
        cells.append(CellChange(named, mean, mean + shift.value, *found))
    effects = [
        {
            _name_effect(effect, study, other): effect
            for effect in (*study.effects(metric), *study.interactions(metric))
        }
        for study, other in ((before, after), (after, before))
    ]
    conclusions = []
    for name in effects[0] | effects[1]:
        both = [found.get(name) for found in effects]
        said = ["not asked" if one is None else one.verdict for one in both]
        values = [one.estimate.value if one and one.estimate else None for one in both]
        sides, moved = (said[0], said[1], values[0], values[1]), of_effects.get(name)
        value, low, high = (moved.value, moved.low, moved.high) if moved else (None, 0.0, 0.0)
        verdict = _verdict(moved, "changed")
        conclusions.append(Conclusion(name, *sides, value, low, high, verdict))
    return Comparison(
        metric,
        before.decide.alpha,
        is_paired,
        tuple(cells),
        len(names) - len(shared),
        len(others) - len(shared),
        tuple(conclusions),
        tuple(_warnings(before, after)),
    )


def _name_cell(study: Study, levels: Levels, common: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return the levels of factors that both sweeps have, and what others change."""
    named = zip(study.factors, levels, study.baseline, strict=True)
    return frozenset((f, level) for f, level, base in named if f in common or level != base)


def _name_effect(effect: Effect, study: Study, other: Study) -> str:
    """Return the name of an effect, with its baseline levels that are not those of ``other``.

    Its levels are in the order of their names: sweeps may list factors in another order.
    """
    effect = replace(effect, change=tuple(sorted(effect.change)), at=tuple(sorted(effect.at)))
    bases, theirs = study.sweep["baseline"], other.sweep["baseline"]
    own = [f"{f}={bases[f]}" for f, _ in effect.change if bases[f] != theirs.get(f, bases[f])]
    return f"{effect.name} from {' and '.join(own)}" if own else effect.name


def _warnings(before: Study, after: Study) -> Iterator[str]:
    one, other = (
        count_values([row.record["provenance"] for row in study.done_rows])
        for study in (before, after)
    )
    for name in one:  # what only one of them records does not tell
        if name in other and one[name].keys() != other[name].keys():
            yield f"{name}: {', '.join(sorted(one[name]))} against {', '.join(sorted(other[name]))}"
    bases, others = (study.sweep["baseline"] for study in (before, after))
    for factor in sorted(bases.keys() & others.keys()):
        if bases[factor] != others[factor]:
            yield f"the baseline has {factor}={bases[factor]} against {factor}={others[factor]}"
    patches, others = (study.sweep.get("patches", {}) for study in (before, after))
    for factor in sorted(patches.keys() & others.keys()):
        for level in sorted(patches[factor].keys() & others[factor].keys()):
            settings = [each[factor][level] for each in (patches, others)]
            if settings[0] != settings[1]:
                first, second = map(format_settings, settings)
                yield f"{factor}={level} sets {first or 'nothing'} against {second or 'nothing'}"
    if before.seeds != after.seeds:
        first, second = (", ".join(map(str, study.seeds)) for study in (before, after))
        yield f"seeds: {first} against {second}"
    if before.sweep.get("experiment_yaml") != after.sweep.get("experiment_yaml"):
        yield "base experiments differ"
    if before.primary_metric != after.primary_metric:
        yield f"quality is measured by {before.primary_metric} against {after.primary_metric}"


# Shifts


@dataclass(frozen=True)
class Shift:
    """The second sweep's estimate minus the first one's.

    Attributes:
        kind: As of `kvlab.analysis.statistics.Estimate`.
        seeds: Number of seeds: of pairs, or the smaller number of independent ones.
        low: Lower end of the simultaneous interval; 0 where zero itself is excluded.
        high: Upper end; 0 where zero itself is excluded.
    """

    value: float
    kind: str
    seeds: int
    error: StandardError | None = None
    low: float = 0.0
    high: float = 0.0

    @property
    def is_found(self) -> bool:
        """Whether the truths behind the two estimates differ."""
        return self.kind == "exact" or (self.kind == "tested" and not self.low < 0 < self.high)


def _verdict(shift: Shift | None, found: str) -> str:
    if shift is None:
        return "not compared"
    return found if shift.is_found else VERDICTS.get(shift.kind, VERDICTS["within noise"]).words


def estimate_shifts(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> tuple[dict[Levels, Shift], dict[str, Shift], bool]:
    """Estimate and judge the shifts between two sweeps.

    Args:
        shared: Cells of the first sweep -> the same cells of the second one.

    Returns:
        Cell -> shift of its mean; name of a level or of two levels -> shift of what it does; and
        whether trials were paired by seed.
    """
    seeds = set(before.seeds) & set(after.seeds)
    is_paired = 0 < min(2, len(before.seeds), len(after.seeds)) <= len(seeds)
    estimates = _paired_shifts if is_paired else _independent_shifts
    cells, effects = estimates(before, after, shared, metric)
    shifts = [*cells.values(), *effects.values()]
    values, errors = [one.value for one in shifts], [one.error for one in shifts]
    tests = judge_family(values, errors, before.decide.alpha)
    pairs = zip(shifts, tests, strict=True)
    judged = (replace(one, low=test.low, high=test.high) for one, test in pairs)
    return {c: next(judged) for c in cells}, {name: next(judged) for name in effects}, is_paired


Parts = tuple[dict[Levels, Shift], dict[str, Shift]]


def _paired_shifts(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> Parts:
    """Estimate shifts from the differences of trials of one cell and one seed."""
    rows: dict[Levels, dict[int, TrialRow]] = {}
    for levels, other in shared.items():
        values, others = before.values(levels, metric), after.values(other, metric)
        for seed in [seed for seed in values if seed in others]:
            one, two = others[seed], values[seed]
            # rounding errors count as zero
            value = 0.0 if abs(one - two) <= 1e-12 * max(abs(one), abs(two)) else one - two
            pair = before.cells[levels][seed], after.cells[other][seed]
            training = " ".join(row.training for row in pair)
            rows.setdefault(levels, {})[seed] = TrialRow(
                levels, seed, pair[0].trial, "done", training, {metric: value}
            )
    differences = {
        levels: {seed: row.measurements[metric] for seed, row in by_seed.items()}
        for levels, by_seed in rows.items()
    }
    scale = max((abs(v) for row in differences.values() for v in row.values()), default=1.0)
    in_steps = METRICS[metric].is_share
    means = {
        levels: estimate(list(row.values()), scale, in_steps=in_steps)
        for levels, row in differences.items()
    }
    tested = [levels for levels, one in means.items() if one.kind == "tested"]
    of_tested = [differences[levels] for levels in tested]
    found = pool_errors(of_tested, [{levels: 1.0} for levels in tested], differences)
    errors = dict(zip(tested, found, strict=True))
    cells = {
        c: Shift(one.value, one.kind, len(differences[c]), errors.get(c))
        for c, one in means.items()
    }
    design = rows, before.estimand, metric
    effects = [*estimate_main_effects(*design), *estimate_interactions(*design)] if rows else []
    return cells, _list_effects(effects, before, after)


def _list_effects(effects: Iterable[Effect], study: Study, other: Study) -> dict[str, Shift]:
    """Return the effects that have an estimate by their names, as if each were a shift."""
    found = {}
    for effect in effects:
        if (one := effect.estimate) is not None:
            error = effect.tested_error if effect.is_tested else None
            shift = Shift(effect.value, one.kind, len(effect.seeds), error)
            found[_name_effect(effect, study, other)] = shift
    return found


def _independent_shifts(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> Parts:
    """Estimate shifts between sweeps without a seed in common."""
    cells, in_steps = {}, METRICS[metric].is_share
    for levels, other in shared.items():
        parts = []
        for by_seed in (before.values(levels, metric), after.values(other, metric)):
            if by_seed:
                values = list(by_seed.values())
                one = estimate(values, max(map(abs, values)), in_steps=in_steps)
                error = StandardError(one.standard_error, max(1, len(by_seed) - 1))
                parts.append(Shift(one.value, one.kind, len(by_seed), error))
        if len(parts) == 2:
            cells[levels] = _welch(*parts)
    own, others = (
        _list_effects((*one.mean_effects(metric), *one.interactions(metric)), one, two)
        for one, two in ((before, after), (after, before))
    )
    return cells, {name: _welch(one, others[name]) for name, one in own.items() if name in others}


def _welch(one: Shift, other: Shift) -> Shift:
    """Return the difference of two independent estimates, with Satterthwaite's df."""
    value, seeds = other.value - one.value, min(one.seeds, other.seeds)
    errors = [part.error or StandardError(0.0, 1.0) for part in (one, other)]
    variance = math.fsum(error.value**2 for error in errors)
    if seeds < 2:
        kind = "one seed"
    elif not variance and value == 0:
        kind = "identical"
    elif "unvaried" in (one.kind, other.kind):
        kind = "unvaried"
    else:
        kind = "tested" if variance else "exact"
    if kind != "tested":
        return Shift(value, kind, seeds)
    parts = math.fsum(error.value**4 / error.df for error in errors)
    return Shift(value, kind, seeds, StandardError(math.sqrt(variance), variance**2 / parts))
