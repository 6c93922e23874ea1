"""Matched comparisons: what is paired, what is not, and whether known effects are found."""

import numpy as np
import pytest

from kvlab.report.study import Study
from tests.report.factory import EFFECTS, TIED_GAP, Record, no_learned_hybrid


def study(tmp_path, **changes):
    record = Record(**changes)
    return Study.load(record.write(tmp_path / "store"), record.name)


def effect(found, name):
    return next(one for one in found if one.name == name)


def test_known_effects_are_recovered(tmp_path):
    effects = study(tmp_path, exclude=no_learned_hybrid).effects("loss")
    for one in effects:
        level = one.change[0][1]
        if level == "tied":
            assert one.verdict == "identical"
            continue
        assert one.estimate.low < EFFECTS[level] < one.estimate.high, level
        assert one.verdict == ("better" if level == "rope" else "worse")
        assert one.detectable < 0.02


def test_pairing_removes_what_seeds_share(tmp_path):
    """Seeds differ by ten times the effect; the same difference is seen at each."""
    found = study(tmp_path, seed_noise=1.0, noise=0.002).effects("loss")
    assert effect(found, "horizon=hybrid").verdict == "worse"


def test_counts_of_matched_pairs(tmp_path):
    found = study(tmp_path, exclude=no_learned_hybrid).effects("loss_served")
    position = effect(found, "position=rope")
    # Only at the global horizon: 2 heads x 3 sharings, at 3 seeds.
    assert (position.comparisons, position.designed, position.settings) == (18, 18, 6)
    assert position.limits == (("horizon", ("global",)),)
    # `none` and `tied` share their weights, so they are one condition.
    assert position.groups == 4
    assert effect(found, "sharing=tied").groups == 6


def test_settings_that_share_weights_count_once(tmp_path):
    """With tied cells the one-shot losses come twice; the evidence must stay the same."""
    without = {"heads": ("mha", "mqa"), "sharing": ("none", "trained")}
    whole = {"heads": ("mha", "mqa"), "sharing": ("none", "trained", "tied")}
    one = effect(study(tmp_path / "1", factors=without).effects("loss"), "heads=mqa")
    two = effect(study(tmp_path / "2", factors=whole).effects("loss"), "heads=mqa")
    assert two.settings == one.settings + 1
    assert two.groups == one.groups == 2
    assert two.estimate.df == pytest.approx(one.estimate.df)
    assert two.estimate.error == pytest.approx(one.estimate.error)


def test_a_failed_trial_takes_only_its_pairs(tmp_path):
    def status(levels, seed):
        broken = levels["heads"] == "mqa" and levels["sharing"] == "trained" and seed == 1
        return "failed" if broken else "done"

    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "trained")}
    found = study(tmp_path, factors=factors, status=status).effects("loss")
    heads = effect(found, "heads=mqa")
    assert (heads.comparisons, heads.designed) == (5, 6)
    assert heads.estimate.value == pytest.approx(EFFECTS["mqa"], abs=0.02)


def test_a_missing_seed_does_not_shift_a_group(tmp_path):
    """`tied` differs by 1.5 from `none`; losing it at one seed must not move the mean there."""

    def status(levels, seed):
        return "missing" if levels["sharing"] == "tied" and seed == 0 else "done"

    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
    heads = effect(study(tmp_path, factors=factors, status=status).effects("loss_served"),
                   "heads=mqa")  # fmt: skip
    assert heads.verdict == "worse"
    assert heads.comparisons == 3


def test_one_seed_claims_nothing(tmp_path):
    found = study(tmp_path, seeds=(0,)).effects("loss")
    heads = effect(found, "heads=mqa")
    assert heads.verdict == "one seed: not tested"
    assert not heads.called
    assert heads.detectable is None
    assert heads.estimate.value == pytest.approx(EFFECTS["mqa"], abs=0.02)


def test_levels_without_a_partner_are_not_guessed(tmp_path):
    """Two factors that always move together cannot be told apart."""

    def exclude(levels):
        return (levels["heads"] == "mqa") != (levels["position"] == "rope")

    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}
    found = study(tmp_path, factors=factors, exclude=exclude).effects("loss")
    assert {one.verdict for one in found} == {"no matched pair"}


def test_interactions(tmp_path):
    """Tying costs 1.5 beside everything: additive. A planted extra cost is found."""

    class Planted(Record):
        def loss(self, levels, seed):
            extra = levels["heads"] == "mqa" and levels["sharing"] == "trained"
            return super().loss(levels, seed) + (0.06 if extra else 0.0)

    record = Planted(factors={"heads": ("mha", "mqa"), "position": ("learned", "rope"),
                              "sharing": ("none", "trained", "tied")})  # fmt: skip
    found = Study.load(record.write(tmp_path), "made").interactions("loss_served")
    planted = effect(found, "heads=mqa and sharing=trained")
    assert planted.called
    assert planted.estimate.low < 0.06 < planted.estimate.high
    assert effect(found, "heads=mqa and sharing=tied").estimate.kind == "identical"
    assert not effect(found, "heads=mqa and position=rope").called
    study_again = Study.load(record.write(tmp_path), "made")
    heads = effect(study_again.effects("loss"), "heads=mqa")
    assert heads.estimate.value == pytest.approx(EFFECTS["mqa"] + 0.03, abs=0.01)
    tied = effect(study_again.effects("loss_served"), "sharing=tied")
    assert tied.estimate.value == pytest.approx(TIED_GAP)


class Memory:
    """Cells in memory, so that hundreds of sweeps are fast."""

    factors = {  # noqa: RUF012
        "heads": ("mha", "mqa"),
        "position": ("learned", "rope"),
        "sharing": ("none", "trained", "tied"),
    }

    @classmethod
    def cells(cls, random, effects, seeds):
        from itertools import product

        from kvlab.report.rows import TrialRow

        shared = random.normal(0, 0.1, seeds)
        losses = {}
        cells = {}
        for levels in product(*cls.factors.values()):
            for seed in range(seeds):
                weights = (*levels[:2], levels[2].replace("tied", "none"), seed)
                noise = losses.setdefault(weights, random.normal(0, 0.01))
                loss = 4 + shared[seed] + noise + sum(effects.get(level, 0) for level in levels)
                row = TrialRow(levels, seed, f"{levels}{seed}", "done", str(weights),
                               {"loss": loss})  # fmt: skip
                cells.setdefault(levels, {})[seed] = row
        return cells


def test_simulated_sweeps_without_effects_call_5_percent_at_most():
    from kvlab.report.effects import main_effects

    random = np.random.default_rng(11)
    called = [
        any(one.called for one in main_effects(Memory.cells(random, {}, 3), Memory.factors, "loss"))
        for _ in range(400)
    ]
    assert np.mean(called) <= 0.05 + 1.65 * (0.05 * 0.95 / 400) ** 0.5


def test_a_detectable_effect_is_detected_as_often_as_stated():
    from kvlab.report.effects import main_effects

    random = np.random.default_rng(12)
    first = main_effects(Memory.cells(random, {}, 4), Memory.factors, "loss")
    typical = np.median([
        effect(main_effects(Memory.cells(random, {}, 4), Memory.factors, "loss"),
               "heads=mqa").detectable for _ in range(40)
    ])  # fmt: skip
    assert first[0].tests == 3
    hits = [
        effect(
            main_effects(Memory.cells(random, {"mqa": typical}, 4), Memory.factors, "loss"),
            "heads=mqa",
        ).called
        for _ in range(200)
    ]
    assert 0.7 <= np.mean(hits) <= 0.98
