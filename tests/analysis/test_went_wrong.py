"""Trainings that went wrong: the rule by hand, and what is no longer claimed of their levels."""

import math

import numpy as np
import pytest

from kvlab.analysis.divergence import MOST_DEVIATIONS, find_wrong_trainings
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.store import Store


def make_cells(losses):
    """Cell -> rows by seed, from losses by cell; a third part of the name shares the training."""
    return {
        (name,): {
            seed: TrialRow(
                (name,), seed, f"{name}{seed}", "done", f"{name[0]}{seed}", {"loss": one}
            )
            for seed, one in enumerate(row)
            if not math.isnan(one)
        }
        for name, row in losses.items()
    }


def test_the_rule_by_hand():
    """Distances from the medians, without the medians' own: 1 1 1 1 2 and far ones."""
    losses = {"a": (9.0, 10.0, 11.0), "b": (19.0, 20.0, 21.0), "c": (28.0, 30.0, 30.1)}
    regular = [1, 1, 1, 1, 2, 0.1]
    for wrong in (39.0, 41.0):
        cells = make_cells({**losses, "d": (30.0, 30.0, wrong)})
        deviation = 1.4826 * np.median([*regular, 0, wrong - 30])
        found = find_wrong_trainings(cells)
        expected = (wrong - 30) / deviation
        assert found == ({"d2": pytest.approx(expected)} if expected > MOST_DEVIATIONS else {})
    assert found


def test_better_is_not_wrong_and_few_seeds_tell_nothing():
    many = dict.fromkeys("abcd", (1.0, 1.1, 1.2))
    assert find_wrong_trainings(make_cells({**many, "e": (-9.0, 1.1, 1.2)})) == {}
    assert find_wrong_trainings(make_cells({**many, "e": (1.0, 90.0)})) == {}
    assert find_wrong_trainings(make_cells({"a": (1.0, 1.1, 90.0)})) == {}, "no deviation is known"
    assert list(find_wrong_trainings(make_cells({**many, "e": (1.1, 1.2, 90.0)}))) == ["e2"]


def test_cells_that_share_a_training_count_it_once():
    shared = {
        "a": (1.0, 1.1, 1.2),
        "b": (1.0, 1.1, 1.2),
        "c": (1.0, 1.2, 1.3),
        "d": (1.1, 1.2, 9.0),
    }
    alone = find_wrong_trainings(make_cells(shared))
    again = find_wrong_trainings(make_cells(shared | {"d, tied": (1.1, 1.2, 9.0)}))
    assert list(alone) == ["d2"]
    assert again == alone


# What is claimed


FACTORS = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}
BYTES = {"mha": 4, "mqa": 1}


def make_study(wrong=None, margin=0.2, shift=0.0):
    """Nothing costs anything but ``shift`` of one K/V head; ``wrong`` is ``(cell, seed, nats)``."""
    random, rows = np.random.default_rng(3), []
    for heads in FACTORS["heads"]:
        for position in FACTORS["position"]:
            for seed in range(6):
                loss = 4 + random.normal(0, 0.002) + shift * (heads == "mqa")
                if wrong is not None and wrong[:2] == ((heads, position), seed):
                    loss += wrong[2]
                name = f"{heads} {position} {seed}"
                facts = {"experiment": {"data": {"tokenizer": "a"}}, "kv": {"bytes_at_block_size": BYTES[heads]}}  # fmt: skip
                rows.append(TrialRow((heads, position), seed, name, "done", name, {"loss": loss}, record=facts))  # fmt: skip
    baseline = {factor: levels[0] for factor, levels in FACTORS.items()}
    sweep = {"name": "m", "factors": FACTORS, "baseline": baseline, "patches": {
        "heads": {"mha": {}, "mqa": {"model.n_kv_head": 1}},
        "position": {"learned": {}, "rope": {"model.position": "rope"}}},
        "decide": {"margin": margin, "metric": "loss"}}  # fmt: skip
    return Study(Store("nowhere"), sweep, rows)


BAD = (("mqa", "rope"), 2, 0.05)


def test_no_equivalence_is_claimed_of_a_level_with_a_training_that_went_wrong():
    whole, study = make_study(), make_study(BAD)
    assert {e.verdict for e in whole.effects("loss")} == {"costs less than 0.2"}
    assert list(study.wrong_trainings) == ["mqa rope 2"]
    for effect in study.effects("loss"):
        assert effect.high < 0.2, "its interval alone would say so"
        assert effect.verdict == "not bounded: a training went wrong"
        assert effect.went_wrong == 1
    interactions = {e.verdict_name for e in study.interactions("loss")}
    assert interactions <= {"unbounded", "undecided"}
    assert {e.verdict_name for e in whole.interactions("loss")} == {"equivalent"}


def test_the_same_holds_for_the_cell_but_not_for_others():
    found = make_study(BAD).comparisons
    assert found["mqa", "rope"].verdict_name == "unbounded"
    assert found["mqa", "learned"].verdict == "costs less than 0.2"
    reference = make_study((("mha", "rope"), 2, 0.05)).comparisons
    assert reference["mqa", "rope"].verdict_name == "unbounded", "its reference has one"


def test_a_difference_that_is_found_stays_found():
    """Worse is worse; that it is worse by less than the margin is not said."""
    whole, study = (make_study(wrong, shift=0.05) for wrong in (None, (("mqa", "rope"), 2, 0.02)))
    assert whole.effects("loss")[0].verdict == "worse, but less than 0.2"
    assert study.wrong_trainings
    assert study.effects("loss")[0].verdict == "worse"
    assert study.comparisons["mqa", "rope"].verdict == "worse"


def test_without_them_it_is_judged_as_if_they_never_ran():
    study = make_study(BAD)
    without = study.without_wrong
    assert without.wrong_trainings == {}
    assert {row.seed for row in without.cells["mqa", "rope"].values()} == {0, 1, 3, 4, 5}
    assert {e.verdict for e in without.effects("loss")} == {"costs less than 0.2"}
