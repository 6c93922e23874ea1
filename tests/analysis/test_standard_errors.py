"""Pooled errors: against arithmetic by hand, simulated spreads, and small null sweeps."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from kvlab.analysis.standard_errors import pool_errors
from tests.studies.null_sweeps import (
    ONE_OF_18,
    THREE,
    Structure,
    binary,
    level_by_seed,
    list_structures,
    measure,
    measure_power,
    noisy_baseline,
    simulate,
)


def contrasts(values, weights):
    seeds = range(len(next(iter(values.values()))))
    differences = [
        {s: sum(w * values[c][s] for c, w in one.items()) for s in seeds} for one in weights
    ]
    return pool_errors(differences, weights, {c: dict(enumerate(v)) for c, v in values.items()})


def test_orthogonal_effects_have_k_times_s_minus_1_degrees_of_freedom():
    """A 2x2 design by hand: variances over seeds over squared lengths, averaged."""
    random = np.random.default_rng(1)
    values = {cell: random.normal(size=4) for cell in ("00", "01", "10", "11")}
    for cell, signs in {"00": (-1, -1), "01": (-1, 1), "10": (1, -1), "11": (1, 1)}.items():
        values[cell] = values[cell] + 5 * signs[0]
    weights = [
        {c: 0.5 if c[place] == "1" else -0.5 for c in values} for place in (0, 1)
    ]  # squared length 1
    found = contrasts(values, weights)
    differences = np.array([sum(w * values[c] for c, w in one.items()) for one in weights])
    variances = differences.var(axis=1, ddof=1)
    pooled = (variances.mean() / 4) ** 0.5
    larger, smaller = (found[n] for n in np.argsort(-variances))
    assert smaller.is_pooled
    assert smaller.value == pytest.approx(pooled)
    assert larger.value == pytest.approx((variances.max() / 4) ** 0.5)
    assert smaller.df <= 2 * 3
    assert larger.df == pytest.approx((smaller.df * 3) ** 0.5)
    many = {cell: random.normal(size=500) for cell in values}
    assert min(one.df for one in contrasts(many, weights) if one.is_pooled) == pytest.approx(
        2 * 499, rel=0.05
    )


def test_levels_of_serving_keep_their_own_error():
    """`tied` shares its trained weights with `plain`."""
    structure = Structure({**binary(2), "serving": ("plain", "tied")}, 4)
    effects = next(simulate(structure, 1, np.random.default_rng(2)))
    errors = {effect.name: effect.error for effect in effects}
    assert errors["serving=tied"] is None
    assert errors["f0=on"] is not None
    alone = [effect for effect in effects if effect.name == "serving=tied"]
    assert alone[0].tested_error.value == alone[0].estimate.standard_error


def test_an_error_is_never_smaller_than_the_levels_own():
    """Its own is that of its differences where seeds explain something, else of its trainings."""
    weights, kinds = [{0: -1.0, n: 1.0} for n in range(1, 5)], Counter()
    for number, common in product(range(50), (0.0, 10.0)):
        random = np.random.default_rng(number)
        table = random.normal(size=(5, 3)) * random.uniform(1, 5, (5, 1))
        table += common * random.normal(size=3)
        for error, row in zip(contrasts(dict(enumerate(table)), weights), table[1:], strict=True):
            paired, apart = np.var(row - table[0], ddof=1), np.var([row, table[0]], 1, ddof=1).sum()
            own = paired if error.is_paired else apart
            assert error.value**2 * 3 >= own * (1 - 1e-12)
            kinds[error.is_paired] += 1
    assert min(kinds.values()) > 100


MOST = {
    "noisy baseline, seeds explain nothing": Structure(ONE_OF_18, 3, noisy_baseline, common=0),
    "levels that vary with the seed": Structure(THREE, 3, level_by_seed),
    "at the margin": Structure(THREE, 3, effects=(2.0, 2.0, 0.0, 0.0), margin=2.0),
    "trials missing": list_structures()["4 levels, noisy cell, trials missing, 3 seeds"],
    "half of a level diverges": Structure(THREE, 5, diverges="level"),
}


@pytest.mark.parametrize("structure", MOST.values(), ids=MOST)
def test_sweeps_say_something_false_5_percent_of_the_time_at_most(structure):
    """A small version of `python -m tests.studies.null_sweeps`."""
    sweeps = 120
    rates = measure(structure, sweeps, 0)
    most = 0.05 + 2 * (0.05 * 0.95 / sweeps) ** 0.5
    assert rates.report <= most
    assert rates.coverage >= 1 - most


def test_pooling_finds_more():
    own, report = measure_power(Structure(THREE, 3), 100, 0)
    assert report > own + 0.15


def test_seeds_that_differ_between_levels_are_pooled():
    structure = list_structures()["5 levels, trials missing, 5 seeds"]
    found = []
    for effects in simulate(structure, 20, np.random.default_rng(1)):
        assert {len(effect.seeds) for effect in effects} == {2, 5}
        pooled = [effect for effect in effects if effect.tested_error.is_pooled]
        degrees = {len(effect.seeds): effect.tested_error.df for effect in pooled}
        if len(degrees) == 2:
            found.append(degrees)
    assert found
    for degrees in found:
        assert degrees[2] == pytest.approx(max(1.0, degrees[5] / 4))
