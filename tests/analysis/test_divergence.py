"""Trainings that diverge or go wrong: how often, on which side, and what is said of the level."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.analysis.divergence import MOST_DEVIATIONS, find_wrong_trainings
from kvlab.analysis.effects import estimate_main_effects
from kvlab.analysis.estimand import Estimand
from tests.support.cells import make_cells, make_study

FACTORS = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["done", "diverged", "failed"]), min_size=16, max_size=16),
    st.integers(0, 9),
)
def test_nothing_that_diverged_is_better_or_cheap(statuses, draw):
    random, levels = np.random.default_rng(draw), list(product(*FACTORS.values()))
    losses = {c: 4 + random.normal(0, 0.001, 4) - 0.1 * ("mqa" in c) for c in levels}
    cells = make_cells(losses, status=lambda c, seed: statuses[4 * levels.index(c) + seed])
    for effect in estimate_main_effects(cells, Estimand(levels, FACTORS), "loss", margin=0.5):
        index = list(FACTORS).index(effect.change[0][0])
        pairs = []
        for levels, by_seed in cells.items():
            if levels[index] == effect.change[0][1]:
                partner = list(levels)
                partner[index] = list(FACTORS.values())[index][0]
                pairs += [
                    (row.status, cells[tuple(partner)][s].status) for s, row in by_seed.items()
                ]
        if any(of_level == "diverged" != of_partner for of_level, of_partner in pairs):
            assert effect.verdict_name in ("diverged", "worse", "baseline diverged")
        assert (effect.estimate is not None) == (("done", "done") in pairs)


# Trainings that went wrong


def cells_of(losses):
    return make_cells({(name,): row for name, row in losses.items()})


def test_the_rule_by_hand():
    """Distances from the medians, without the medians' own: 1 1 1 1 2 and far ones."""
    losses = {"a": (9.0, 10.0, 11.0), "b": (19.0, 20.0, 21.0), "c": (28.0, 30.0, 30.1)}
    regular = [1, 1, 1, 1, 2, 0.1]
    for wrong in (39.0, 41.0):
        cells = cells_of({**losses, "d": (30.0, 30.0, wrong)})
        deviation = 1.4826 * np.median([*regular, 0, wrong - 30])
        found = find_wrong_trainings(cells)
        expected = (wrong - 30) / deviation
        assert found == (
            {"('d',) 2": pytest.approx(expected)} if expected > MOST_DEVIATIONS else {}
        )
    assert found


def test_better_is_not_wrong_and_few_seeds_tell_nothing():
    many = dict.fromkeys("abcd", (1.0, 1.1, 1.2))
    assert find_wrong_trainings(cells_of({**many, "e": (-9.0, 1.1, 1.2)})) == {}
    assert find_wrong_trainings(cells_of({**many, "e": (1.0, 90.0)})) == {}
    assert find_wrong_trainings(cells_of({"a": (1.0, 1.1, 90.0)})) == {}, "no deviation is known"
    assert list(find_wrong_trainings(cells_of({**many, "e": (1.1, 1.2, 90.0)}))) == ["('e',) 2"]
    # where most cells lose nothing, one that varies has a scale of its own
    exact = dict.fromkeys("abcd", (1e-5, 2e-5, 3e-5))
    assert find_wrong_trainings(cells_of({**exact, "e": (2.1, 2.2, 2.5)})) == {}
    assert list(find_wrong_trainings(cells_of({**exact, "e": (2.1, 2.2, 9.5)}))) == ["('e',) 2"]


def test_of_shares_fewer_are_wrong_beyond_the_margin():
    def find(**shares):
        losses = {name: tuple(1 - one for one in own) for name, own in shares.items()}
        cells = cells_of(losses)
        for by_seed in cells.values():
            for row in by_seed.values():
                row.measurements["recall"] = 1 - row.measurements["loss"]
        return list(find_wrong_trainings(cells, "recall", 0.02))

    right = dict.fromkeys("abcd", (1.0, 1.0, 1.0))
    assert find(**right, e=(1.0, 1.0, 0.985)) == [], "within the margin"
    assert find(**right, e=(1.0, 1.0, 0.975)) == ["('e',) 2"]
    assert find(**right, e=(0.2, 0.2, 1.0)) == [], "better is not wrong"
    vary = dict.fromkeys("abcd", (0.3, 0.4, 0.5))
    assert find(**vary, e=(0.5, 0.55, 0.2)) == [], "within what all vary by"


BYTES = {"mha": 4, "mqa": 1}


def study_with(wrong=None, rope="model.position"):
    """Nothing costs anything; ``wrong`` is ``(cell, seed, nats)``."""
    random = np.random.default_rng(3)
    losses = {cell: 4 + random.normal(0, 0.002, 6) for cell in product(*FACTORS.values())}
    if wrong is not None:
        losses[wrong[0]][wrong[1]] += wrong[2]
    cells = make_cells(losses, record=lambda cell: {
        "experiment": {"data": {"tokenizer": "a"}}, "kv": {"bytes_at_block_size": BYTES[cell[0]]},
    })  # fmt: skip
    patches = {
        "heads": {"mha": {}, "mqa": {"model.n_kv_head": 1}},
        "position": {"learned": {}, "rope": {rope: "rope"}},
    }
    decide = {"margin": 0.2, "metric": "loss"}
    return make_study(cells, FACTORS, patches=patches, decide=decide)


BAD = (("mqa", "rope"), 2, 0.05)


def test_no_equivalence_is_claimed_of_a_level_with_a_training_that_went_wrong():
    whole, study = study_with(), study_with(BAD)
    assert {e.verdict for e in whole.effects("loss")} == {"costs less than 0.2"}
    assert list(study.wrong_trainings) == ["('mqa', 'rope') 2"]
    for effect in study.effects("loss"):
        assert effect.high < 0.2, "its interval alone would say so"
        assert effect.verdict == "not bounded: a training went wrong"
        assert effect.went_wrong == 1
    served = study_with((("mqa", "learned"), 2, 0.05), rope="serving.kv_rotate").effects("loss")
    counts = {effect.name: effect.went_wrong for effect in served}
    assert (counts["heads=mqa"], counts["position=rope at heads=mqa"]) == (1, 0)
    interactions = {e.verdict_name for e in study.interactions("loss")}
    assert interactions <= {"unbounded", "undecided"}
    assert {e.verdict_name for e in whole.interactions("loss")} == {"equivalent"}
