"""Pooled errors and looks in small null sweeps, and who keeps an error of its own."""

import numpy as np
import pytest

from tests.studies import null_sweeps as study
from tests.studies.null_sweeps import LOOKED, THREE, Structure, list_structures, look, simulate


def test_levels_of_serving_keep_their_own_error():
    """`tied` shares its trained weights with `plain`."""
    structure = Structure({**study.binary(2), "serving": ("plain", "tied")}, 4)
    effects = next(simulate(structure, 1, np.random.default_rng(2)))
    errors = {effect.name: effect.error for effect in effects}
    assert errors["serving=tied"] is None
    assert errors["f0=on"] is not None
    alone = [effect for effect in effects if effect.name == "serving=tied"]
    assert alone[0].tested_error.value == alone[0].estimate.standard_error


MOST = {
    "noisy baseline, seeds explain nothing": Structure(
        study.ONE_OF_18, 3, study.noisy_baseline, common=0
    ),
    "levels that vary with the seed": Structure(THREE, 3, study.level_by_seed),
    "at the margin": Structure(THREE, 3, effects=(2.0, 2.0, 0.0, 0.0), margin=2.0),
    "trials missing": list_structures()["4 levels, noisy cell, trials missing, 3 seeds"],
    "half of a level diverges": Structure(THREE, 5, diverges="level"),
}


@pytest.mark.parametrize("structure", MOST.values(), ids=MOST)
def test_sweeps_say_something_false_5_percent_of_the_time_at_most(structure):
    """A small version of `python -m tests.studies null_sweeps`."""
    sweeps = 120
    _, report, coverage = study.measure(structure, sweeps, 0)
    most = 0.05 + 2 * (0.05 * 0.95 / sweeps) ** 0.5
    assert report <= most
    assert coverage >= 1 - most


def test_pooling_finds_more():
    own, report = study.measure_power(Structure(THREE, 3), 100, 0)
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


@pytest.mark.parametrize("name", ["5 nulls", "4 at the margin, 1 null"])
def test_a_sweep_with_looks_keeps_its_error(name):
    sweeps = 300
    slack = 3 * (0.05 * 0.95 / sweeps) ** 0.5  # three Monte Carlo errors
    tally = look(LOOKED[name], sweeps)
    assert tally.error <= 0.05 + slack
    assert tally.coverage >= 0.95 - slack
    assert tally.trials < 0.95


def test_looks_find_nearly_what_the_most_seeds_find_with_fewer():
    tally = look(LOOKED["5 of 3"], 50)
    assert tally.power > 0.98
    assert tally.trials < 0.8
