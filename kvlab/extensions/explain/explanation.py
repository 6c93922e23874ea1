"""Explain a difference of a report: what it is computed from, so that anyone can compute it again.

An `Explanation` has what the report says of a cell or of a level, and the terms behind it: at every
seed the difference is the sum of weight times value, and then the mean over the seeds.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.effects import Effect, change_name
from kvlab.analysis.looks import find_last_test
from kvlab.analysis.matched_pairs import find_matched_corners
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_count


@dataclass(frozen=True)
class Term:
    """The value of one trial, and its weight at its seed."""

    seed: int
    cell: str
    trial: str
    value: float
    weight: float


@dataclass(frozen=True)
class SettingUse:
    """One setting of a level: whether its effect is a mean over it.

    Attributes:
        partner: The cell with the baseline's level, and all other levels equal.
        difference: Mean over seeds; None if the setting is left out.
        left_out: Why it is left out; empty if it is not.
    """

    cell: str
    partner: str
    difference: float | None
    weight: float
    left_out: str = ""


@dataclass(frozen=True)
class Explanation:
    """A difference with all that the report says of it, and its terms.

    Attributes:
        metric: The metric; every value is in its unit.
        value: The difference; None if nothing could be compared.
        error: The standard error that it is tested with; None if it is not tested.
        interval: The simultaneous interval; None if none holds.
        confidence: Of the intervals together, in percent.
        terms: Two by two, where they are pairs; by seed.
        notes: What else there is to know, in sentences.
        over_all_seeds: The difference of the cells' means over all their seeds, where that is the
            value; None where the mean of the terms is.
    """

    title: str
    metric: str
    value: float | None
    error: StandardError | None
    interval: tuple[float, float] | None
    confidence: float
    family: str
    verdict: str
    meaning: str
    terms: tuple[Term, ...]
    settings: tuple[SettingUse, ...] = ()
    notes: tuple[str, ...] = ()
    over_all_seeds: float | None = None

    @property
    def by_seed(self) -> dict[int, float]:
        """The weighted sum of the terms at every seed."""
        parts: dict[int, list[float]] = {}
        for term in self.terms:
            parts.setdefault(term.seed, []).append(term.weight * term.value)
        return {seed: math.fsum(one) for seed, one in parts.items()}

    @property
    def computed(self) -> float | None:
        """The difference, computed again from the terms."""
        sums = self.by_seed.values()
        return math.fsum(sums) / len(sums) if sums else None

    @property
    def own_error(self) -> float | None:
        """The standard error of the seeds' sums alone; None with one seed."""
        sums = list(self.by_seed.values())
        return statistics.stdev(sums) / math.sqrt(len(sums)) if len(sums) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, with what is computed from the terms."""
        sums = [{"seed": seed, "difference": value} for seed, value in self.by_seed.items()]
        again = {"by_seed": sums, "computed": self.computed, "own_error": self.own_error}
        return {**asdict(self), **again}


def explain_cell(study: Study, levels: Levels) -> Explanation | None:
    """Explain a cell's difference from its reference; None if it is compared with nothing."""
    found = study.comparisons.get(levels) if study.search is None else None
    if found is None:
        return None
    estimate, effect = found.estimate, found.effect
    error = None
    if estimate.kind == "tested":
        error = StandardError(estimate.standard_error, estimate.df)
    return Explanation(
        f"{study.label(levels)} minus {study.label(found.reference)}",
        study.primary_metric,
        found.value,
        error if effect is None or not effect.is_tested else effect.tested_error,
        (found.low, found.high) if found.has_interval else None,
        100 * (1 - study.decide.alpha),
        "cells" if effect is None else "levels",
        found.verdict,
        VERDICTS[found.verdict_name].meaning if found.verdict_name else "",
        _list_terms(study, found.seeds, {levels: 1.0, found.reference: -1.0}),
        notes=tuple(_note_comparison(study, found)),
        over_all_seeds=_subtract_means(study, effect),
    )


def _note_comparison(study: Study, found: CellComparison) -> Iterator[str]:
    pairs = zip(study.factors, found.reference, study.baseline, strict=True)
    kept = [f"{factor}={level}" for factor, level, base in pairs if level != base]
    if kept:
        label = study.label(found.reference)
        yield f"its reference is {label}, as {', '.join(kept)} saves no byte or is set as reference"
    else:
        yield "its reference is the baseline"
    if found.size_factor is not None:
        yield f"it stores {found.size_factor:.4g} times less K/V than its reference"
    if found.token_factor not in (None, 1.0):
        yield f"it was trained on {found.token_factor:.4g} times the tokens of its reference"
    if study.estimand.is_served_otherwise(found.levels):
        yield "it is served otherwise than it was trained"
    if found.effect is not None:
        yield f"it differs as {found.effect.name} does, and has the interval of that effect"
    if found.later is not None:
        yield (
            f"over all seeds it is {found.later.value:+.4g}; the verdict is that of the look over"
            f" {format_count(len(found.seeds), 'seed')}"
        )
    if found.is_explored:
        yield "the sweep claims something else: this was only looked at"
    if wrong := study.count_wrong((found.levels, found.reference)):
        yield f"{format_count(wrong, 'training')} of the two cells went wrong"


def explain_level(study: Study, factor: str, level: str) -> list[Explanation]:
    """Explain what a level does: one explanation, or one for each kind of setting told apart."""
    effects = study.effects(study.primary_metric)
    return [_explain_effect(study, one) for one in effects if one.change == ((factor, level),)]


def _explain_effect(study: Study, effect: Effect) -> Explanation:
    factor, _ = effect.change[0]
    settings, weights = [], dict(effect.weights)
    if not effect.is_contrast:
        settings = list(_list_settings(study, effect))
        weights = {}
        for levels, weight in effect.weights.items():
            partner = _find_partner(study, factor, levels)
            if levels != partner:  # pairs side by side
                weights |= {levels: weight, partner: effect.weights[partner]}
    return Explanation(
        f"effect of {effect.name} against {factor}={study.factors[factor][0]}",
        effect.metric,
        None if effect.estimate is None else effect.value,
        effect.tested_error if effect.is_tested else None,
        (effect.low, effect.high) if effect.has_interval else None,
        100 * (1 - effect.alpha),
        "levels",
        effect.verdict,
        VERDICTS[effect.verdict_name].meaning,
        _list_terms(study, effect.seeds, weights),
        tuple(settings),
        tuple(_note_effect(study, effect)),
        _subtract_means(study, effect),
    )


def _subtract_means(study: Study, effect: Effect | None) -> float | None:
    """Return the difference of the cells' means over all their seeds, if it is the effect."""
    if effect is None or effect.error is None or not effect.error.shift:
        return None
    means = {levels: study.mean(levels, study.primary_metric) or 0.0 for levels in effect.weights}
    return math.fsum(weight * means[levels] for levels, weight in effect.weights.items())


def _list_terms(
    study: Study, seeds: Iterable[int], weights: Mapping[Levels, float]
) -> tuple[Term, ...]:
    metric = study.primary_metric
    rows = [(study.cells[levels][s], w) for s in seeds for levels, w in weights.items()]
    return tuple(
        Term(row.seed, study.label(row.levels), row.trial, row.measurements[metric], weight)
        for row, weight in rows
    )


def _list_settings(study: Study, effect: Effect) -> Iterator[SettingUse]:
    """Yield the settings that an effect is the mean over, and those that it leaves out.

    Where settings are told apart, those of other effects are not listed.
    """
    factor, level = effect.change[0]
    place = list(study.factors).index(factor)
    chosen = study.estimand.select(
        list(find_matched_corners(study.cells, study.factors, effect.change))
    )
    entering = {corners[0][1] for corners in chosen}
    means = dict(effect.by_setting)
    for levels in study.cells:
        named = dict(zip(study.factors, levels, strict=True))
        if named[factor] != level or any(named[other] != at for other, at in effect.at):
            continue
        partner = _find_partner(study, factor, levels)
        others, why = (*levels[:place], *levels[place + 1 :]), ""
        if others not in means:
            why = _say_left_out(study, levels, partner, is_chosen=levels in entering)
        names = study.label(levels), study.label(partner)
        yield SettingUse(*names, means.get(others), effect.weights.get(levels, 0.0), why)


def _find_partner(study: Study, factor: str, levels: Levels) -> Levels:
    """Return the cell with the baseline's level of one factor; the design may lack it."""
    named = {**dict(zip(study.factors, levels, strict=True)), factor: study.factors[factor][0]}
    return tuple(named.values())


def _say_left_out(study: Study, levels: Levels, partner: Levels, *, is_chosen: bool) -> str:
    """Return why a setting is not part of an effect."""
    if partner not in study.cells:
        return f"the design has no cell {study.label(partner)}"
    if not is_chosen:
        if study.estimand.is_served_otherwise(partner):
            return "served otherwise than it was trained"
        return "decide.over leaves it out"
    if diverged := [study.label(c) for c in (levels, partner) if c in study.diverged_cells]:
        return f"a training of {' and of '.join(diverged)} diverged"
    metric = study.primary_metric
    seeds = sorted(study.values(levels, metric).keys() & study.values(partner, metric).keys())
    listed = ", ".join(map(str, seeds))
    return f"both cells have values at seeds {listed} only" if seeds else "no seed has both values"


def _note_effect(study: Study, effect: Effect) -> Iterator[str]:
    if effect.is_contrast:
        yield "no two cells differ in this level alone: a weighted sum of all cells (least squares)"
        if effect.aliases:
            yield f"it is aliased with {'; '.join(map(change_name, effect.aliases))}"
    elif study.estimand.changes_serving_alone(effect.change):
        yield "a level of serving: each setting against the same weights served as trained"
    elif study.decide.over:
        over = ", ".join(f"{name}={'|'.join(levels)}" for name, levels in study.decide.over.items())
        yield f"the mean over the settings with {over}, as decide.over declares"
    else:
        yield "the mean over the settings that are served as they were trained"
    if effect.groups < effect.settings:
        count = format_count(effect.groups, "group")
        yield f"settings that share trained weights are averaged first: {count}"
    if effect.at and effect.over_all is not None:
        yield (
            f"the settings disagree, so each kind has its own; the mean over all is"
            f" {effect.over_all.value:+.4g}"
        )
    is_looked_at = study.declared_looks is not None and effect.is_claimed
    look = find_last_test(study.taken_looks, effect.claim) if is_looked_at else None
    if look is not None:
        yield f"judged at look {look.number}, over {format_count(look.seeds, 'seed')}"
    if effect.went_wrong:
        yield f"{format_count(effect.went_wrong, 'training')} of these cells went wrong"
