"""Designs without matched pairs: contrasts against statsmodels, aliases against the textbook."""

from functools import partial
from itertools import combinations, product

import numpy as np
import pytest

from kvlab.analysis.estimand import Estimand
from kvlab.analysis.interactions import SPLIT_SHARE, estimate_interactions
from kvlab.analysis.matched_pairs import find_contrast
from tests.support.cells import make_cells
from tests.support.design_requests import list_positions, make_request

FACTORS = dict.fromkeys("abcd", ("off", "on"))


def half(levels):
    """The 2^(4-1) fraction of resolution IV: d = abc."""
    return sum(level == "on" for level in levels) % 2 == 0


HALF = [levels for levels in product(("off", "on"), repeat=4) if half(levels)]


def change(*names):
    return tuple((name, "on") for name in names)


def aliases(contrasts, *names):
    found = contrasts(change(*names))
    return {"".join(factor for factor, _ in one) for one in found.aliases}


def test_a_factor_with_one_level_changes_no_contrast_and_a_full_design_has_no_aliases():
    factors = {"text": ("long",), **FACTORS}
    contrasts = partial(find_contrast, [("long", *levels) for levels in HALF], factors)
    assert aliases(contrasts, "a") == {"bcd"}
    assert aliases(contrasts, "a", "b") == {"cd"}
    factors = {**FACTORS, "e": ("x", "y", "z")}
    contrasts = partial(find_contrast, list(product(*factors.values())), factors)
    assert aliases(contrasts, "a") == set()
    assert contrasts((("e", "y"),)).aliases == ()
    assert contrasts((("a", "on"), ("e", "z"))).aliases == ()


def test_contrasts_are_least_squares():
    """Against statsmodels, on an unbalanced fraction with a factor of three levels."""
    import pandas as pd
    import statsmodels.formula.api as smf

    factors = {"a": ("a0", "a1"), "b": ("b0", "b1", "b2"), "c": ("c0", "c1"), "d": ("d0", "d1")}
    random = np.random.default_rng(8)
    cells = list(product(*factors.values()))
    chosen = [cells[i] for i in sorted(random.choice(len(cells), 15, replace=False))]
    losses = {levels: float(random.normal()) for levels in chosen}
    frame = pd.DataFrame([dict(zip(factors, c, strict=True), y=y) for c, y in losses.items()])
    contrasts = partial(find_contrast, chosen, factors)

    def ours(*levels):
        found = contrasts(levels)
        assert sum(found.weights.values()) == pytest.approx(0.0, abs=1e-12)
        return sum(weight * losses[cell] for cell, weight in found.weights.items())

    mains = smf.ols("y ~ a + b + c + d", frame).fit().params
    for factor, names in factors.items():
        for level in names[1:]:
            expected = mains[f"{factor}[T.{level}]"]
            assert ours((factor, level)) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    pair = smf.ols("y ~ a + b + c + d + a:b", frame).fit().params
    for level in ("b1", "b2"):
        expected = pair[f"a[T.a1]:b[T.{level}]"]
        assert ours(("a", "a1"), ("b", level)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def sweep(random, effects, seeds, design=HALF):
    """One simulated design, by default the half fraction: cells -> seed -> row."""
    shared, losses = random.normal(0, 0.1, seeds), {}
    for levels in design:
        on = {name for name, level in zip("abcd", levels, strict=True) if level == "on"}
        known = sum(value for names, value in effects.items() if set(names) <= on)
        losses[levels] = 4 + shared + random.normal(0, 0.01, seeds) + known
    return make_cells(losses)


CORNER = [("off",) * 4, *(("off",) * i + ("on",) + ("off",) * (3 - i) for i in range(4))]


def test_single_levels_and_all_together_have_one_interaction():
    """Six pairs would be one number under six names, and none of them ran."""
    cells = sweep(np.random.default_rng(25), {"ab": 0.08}, 3, [*CORNER, ("on",) * 4])
    (one,) = estimate_interactions(cells, Estimand(list(cells), FACTORS), "loss")
    assert one.change == change("a", "b", "c", "d")
    assert one.level == pytest.approx(SPLIT_SHARE * 0.05)

    def loss(levels, seed):
        return cells[levels][seed].measurements["loss"]

    for seed, value in one.by_seed:
        base = loss(CORNER[0], seed)
        parts = sum(loss(levels, seed) - base for levels in CORNER[1:])
        assert value == pytest.approx(loss(("on",) * 4, seed) - base - parts)


@pytest.mark.parametrize(("count", "fraction"), [(3, 2), (4, 2), (5, 4), (7, 8)])
def test_aliases_of_the_fractions_that_sweeps_have(count, fraction):
    """Two columns of signs that are equal or opposite over the fraction's own cells."""
    positions = list_positions("fractional", make_request(*[2] * count, fraction=fraction))
    names = "abcdefghij"[:count]
    factors = {name: (f"{name}0", f"{name}1") for name in names}
    cells = [tuple(f"{n}{i}" for n, i in zip(names, cell, strict=True)) for cell in positions]
    signs = dict(zip(names, (2 * np.array(positions) - 1).T, strict=True))
    contrasts = partial(find_contrast, cells, factors)

    def on(effect):
        return tuple((name, f"{name}1") for name in effect)

    def mixed(one, other):
        columns = [np.prod([signs[name] for name in effect], axis=0) for effect in (one, other)]
        return abs(int(columns[0] @ columns[1])) == len(cells)

    pairs, triples = (list(combinations(names, size)) for size in (2, 3))
    for effect in [(name,) for name in names] + pairs:
        found = contrasts(on(effect))
        if len(effect) == 2 and any(mixed(effect, (name,)) for name in names):
            assert found is None, "it is a main effect"
            continue
        expected = [on(e) for e in pairs + triples if e != effect and mixed(effect, e)]
        assert list(found.aliases) == expected, effect
