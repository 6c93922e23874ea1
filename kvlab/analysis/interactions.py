"""What two levels do together, and effects told apart where their settings disagree.

An interaction is the difference of two differences: what a level does beside another level, and
beside that one's baseline level, or the first level beside which the design has it. The
interactions of a sweep are tested together, with a fifth of its error. A level that acts
differently beside the levels of another factor is estimated beside each of them apart, and these
parts share its error. A level of serving is always estimated apart.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations, product

from kvlab.analysis import effects as estimation
from kvlab.analysis.effects import Effect
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.matched_pairs import Cells, Change, Factors, find_matched_corners
from kvlab.analysis.statistics import ALPHA
from kvlab.analysis.trial_rows import Levels

_SAME_WEIGHT = 1e-6
"""Weights of two contrasts that differ by less are equal."""

SPLIT_SHARE = 0.2
"""Part of alpha at which interactions are tested, and so at which settings are told apart."""


def estimate_interactions(
    cells: Cells,
    estimand: Estimand,
    metric: str,
    *,
    alpha: float = ALPHA,
    margin: float | None = None,
) -> list[Effect]:
    """Estimate the interaction of every two levels that the design has together.

    Interactions that are one contrast are one effect, which names them all. In a design of single
    levels and one cell with all of them, every pair is the same contrast: what all levels together
    do beyond the sum of each. There the effect is named by all of these levels.

    Args:
        alpha: The sweep's; interactions are judged at `SPLIT_SHARE` of it.

    Returns:
        One effect per contrast, judged together.
    """
    factors = estimand.factors
    together = {
        frozenset(pair)
        for levels in cells
        for pair in combinations(zip(factors, levels, strict=True), 2)
    }
    changes = [
        ((first, one), (second, other))
        for first, second in combinations(factors, 2)
        for one, other in product(factors[first][1:], factors[second][1:])
        if {(first, one), (second, other)} in together
    ]
    effects = []
    for change in changes:
        against = _find_other_base(together, factors, change)
        own = {**factors, **{factor: (level, *factors[factor]) for factor, level in against}}
        found = estimation.estimate_changes(cells, own, [change], metric, estimand)
        effects += [replace(one, against=against) for one in found]
    distinct = _join_equal_contrasts([one for one in effects if one.pairs_designed], factors)
    judged = estimation.with_pooled_errors(distinct, cells, estimand)
    return estimation.judge_together(judged, alpha * SPLIT_SHARE, margin)


def _find_other_base(
    together: Collection[frozenset[tuple[str, str]]], factors: Factors, change: Change
) -> Change:
    """Return the level that an interaction is against where the design lacks a baseline level.

    A level may have no cell beside another factor's baseline level, as layers of another kind have
    none where no layer is of it. Beside other levels of that factor it can still act differently.

    Args:
        together: Pairs of levels of two factors that a cell of the design has.

    Returns:
        The first level of that factor beside which there are the changed level and its baseline
        level; empty for the factor's baseline level.
    """
    for one, (factor, level) in (change, change[::-1]):
        base = (one[0], factors[one[0]][0])
        if {one, (factor, factors[factor][0])} in together:
            continue
        others = ((factor, other) for other in factors[factor])
        found = next((o for o in others if {one, o} in together and {base, o} in together), None)
        if found is not None and found[1] != level:
            return (found,)
    return ()


def _join_equal_contrasts(effects: list[Effect], factors: Factors) -> list[Effect]:
    """Return one effect for every contrast, up to its sign, with the names of all."""
    sets: dict[frozenset[tuple[Levels, float]], list[Effect]] = {}
    for number, effect in enumerate(effects):
        weights: dict[Levels, float] = {(str(number),): 1.0}  # pairs of its own
        if effect.is_contrast:
            weights = {levels: round(weight, 6) for levels, weight in effect.weights.items()}
        negated = frozenset((levels, -weight) for levels, weight in weights.items())
        key = negated if negated in sets else frozenset(weights.items())
        sets.setdefault(key, []).append(effect)
    named = []
    for first, *others in sets.values():
        if others and (corner := _find_corner(first.weights, factors)) is not None:
            named.append(replace(first, change=corner, aliases=()))
            continue
        changes = [other.change for other in others]
        aliases = tuple(alias for alias in first.aliases if alias not in changes)
        cell = next(iter(first.weights), ())
        signs = [1 if first.weights[cell] * other.weights[cell] > 0 else -1 for other in others]
        same_as = tuple(zip(signs, changes, strict=True))
        named.append(replace(first, same_as=same_as, aliases=aliases))
    return named


def _find_corner(weights: dict[Levels, float], factors: Factors) -> Change | None:
    """Return the levels of a cell that a contrast compares with the sum of its levels, each alone.

    None for other contrasts.
    """
    base = tuple(levels[0] for levels in factors.values())
    for cell, weight in weights.items():
        changed = [index for index, level in enumerate(cell) if level != base[index]]
        singles = [(*base[:i], cell[i], *base[i + 1 :]) for i in changed]
        expected = {cell: 1.0, base: len(changed) - 1.0, **dict.fromkeys(singles, -1.0)}
        if (
            weight > 0
            and len(changed) > 2
            and weights.keys() == expected.keys()
            and all(abs(weights[one] - expected[one]) < _SAME_WEIGHT for one in weights)
        ):
            names = list(factors)
            return tuple((names[index], cell[index]) for index in changed)
    return None


def tell_settings_apart(
    cells: Cells, effects: Sequence[Effect], interactions: Sequence[Effect], estimand: Estimand
) -> list[Effect]:
    """Replace every level whose settings disagree by one effect for each kind of setting.

    Args:
        effects: Mean effects over settings, see `estimate_main_effects`.

    Returns:
        Effects that are judged together.
    """
    parts: list[Effect] = []
    for effect in effects:
        others = _disagreeing_factors(effect, interactions, estimand)
        found = _estimate_parts(cells, effect, others, estimand) if others else []
        parts += found if len(found) > 1 else [effect]
    if not effects or len(parts) == len(effects):
        return list(effects)
    judged = estimation.with_pooled_errors(parts, cells, estimand)
    return estimation.judge_together(judged, effects[0].alpha, effects[0].margin)


def _disagreeing_factors(
    effect: Effect, interactions: Sequence[Effect], estimand: Estimand
) -> list[str]:
    """Return the other factors beside whose levels a level's effect differs."""
    others = [factor for factor in estimand.factors if factor != effect.change[0][0]]
    if effect.is_contrast or effect.estimate is None or not effect.is_claimed:
        return []
    if estimand.changes_serving_alone(effect.change):
        seen = list(zip(*(levels for levels, _ in effect.by_setting), strict=True))
        return [factor for factor, levels in zip(others, seen, strict=True) if len(set(levels)) > 1]
    found = {
        factor
        for one in interactions
        if one.is_significant and effect.change[0] in one.change
        for factor, level in one.change
        if not estimand.changes_serving_alone(((factor, level),))
    }
    return [factor for factor in others if factor in found]


def _estimate_parts(
    cells: Cells, effect: Effect, others: Sequence[str], estimand: Estimand
) -> list[Effect]:
    """Estimate a level beside every combination of levels of other factors, apart."""
    factors = estimand.factors
    places = [list(factors).index(factor) for factor in others]
    matched = estimand.select(list(find_matched_corners(cells, factors, effect.change)))
    roots = [tuple(corners[-1][1][place] for place in places) for corners in matched]
    parts = []
    for levels in dict.fromkeys(roots):
        chosen = [corners for corners, root in zip(matched, roots, strict=True) if root == levels]
        part = estimation.estimate_matched(cells, factors, effect.change, effect.metric, chosen)
        if part.estimate is not None or part.divergence is not None:
            at = tuple(zip(others, levels, strict=True))
            part = replace(part, at=at, over_all=effect.estimate, is_claimed=effect.is_claimed)
            parts.append(replace(part, is_disturbed=effect.is_disturbed))
    return parts
