"""Matched comparisons: what is paired, what is not, and whether known effects are found."""

import itertools

import numpy as np
import pytest
from scipy import stats

from kvlab.report.effects import interactions, main_effects
from kvlab.report.rows import TrialRow
from kvlab.report.statistics.grouped import POWER, smallest_detectable
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
        assert abs(one.estimate.value - EFFECTS[level]) < 3 * one.estimate.error, level
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

    noise = 0.01
    factors = {  # noqa: RUF012
        "heads": ("mha", "mqa"),
        "position": ("learned", "rope"),
        "sharing": ("none", "trained", "tied"),
    }

    @classmethod
    def has(cls, levels, name):
        """Whether a cell has all levels of an effect that is named as the report names it."""
        own = {f"{factor}={level}" for factor, level in zip(cls.factors, levels, strict=True)}
        return set(name.split(" and ")) <= own

    @classmethod
    def cells(cls, random, effects, seeds):
        """One simulated sweep; ``effects`` by name, such as ``heads=mqa and position=rope``."""
        shared = random.normal(0, 0.1, seeds)
        losses = {}
        cells = {}
        for levels in itertools.product(*cls.factors.values()):
            for seed in range(seeds):
                weights = (*levels[:2], levels[2].replace("tied", "none"), seed)
                noise = losses.setdefault(weights, random.normal(0, cls.noise))
                known = sum(v for level, v in effects.items() if cls.has(levels, level))
                loss = 4 + shared[seed] + noise + known
                row = TrialRow(levels, seed, f"{levels}{seed}", "done", str(weights),
                               {"loss": loss})  # fmt: skip
                cells.setdefault(levels, {})[seed] = row
        return cells


@pytest.mark.parametrize("compare", [main_effects, interactions])
def test_a_thousand_sweeps_without_effects_call_5_percent_at_most(compare):
    """A call anywhere in a sweep's table counts, as it would to its reader."""
    random = np.random.default_rng(11)
    found = [compare(Memory.cells(random, {}, 3), Memory.factors, "loss") for _ in range(1000)]
    assert np.mean([any(one.called for one in family) for family in found]) <= 0.05
    tested = [one.estimate for family in found for one in family if one.tested]
    assert len(tested) >= 3000
    assert 0.93 <= np.mean([one.low <= 0 <= one.high for one in tested]) <= 0.97


def test_two_seeds_are_as_honest():
    random = np.random.default_rng(13)
    sweeps = [Memory.cells(random, {}, 2) for _ in range(1000)]
    for compare in (main_effects, interactions):
        found = [compare(cells, Memory.factors, "loss") for cells in sweeps]
        assert np.mean([any(one.called for one in family) for family in found]) <= 0.05
        tested = [one.estimate for family in found for one in family if one.tested]
        assert 0.93 <= np.mean([one.low <= 0 <= one.high for one in tested]) <= 0.97


@pytest.mark.parametrize("seeds", [2, 3])
def test_over_seeds_alone_holds_where_one_setting_is_far_noisier(seeds):
    """Ten times the spread in one group, which too few seeds do not show."""
    random = np.random.default_rng(16)
    false = 0
    for _ in range(1500):
        cells = Memory.cells(random, {}, seeds)
        for row in cells["mqa", "rope", "trained"].values():
            row.measurements["loss"] += random.normal(0, 10 * Memory.noise)
        heads = effect(main_effects(cells, Memory.factors, "loss"), "heads=mqa")
        assert heads.over_seeds.df == seeds - 1
        false += heads.over_seeds.p < 0.05
    assert 0.03 <= false / 1500 <= 0.07


def test_over_seeds_is_the_t_test_over_their_means(tmp_path):
    heads = effect(study(tmp_path).effects("loss"), "heads=mqa")
    theirs = stats.ttest_1samp([value for _, value in heads.by_seed], 0.0)
    assert heads.over_seeds.p == pytest.approx(theirs.pvalue, rel=1e-9)


def test_groups_at_unlike_seeds_have_no_test_over_seeds(tmp_path):
    """A mean over seeds that not all groups have would move with which groups are in it."""

    def status(levels, seed):
        return "failed" if set(levels.values()) >= {"mqa", "trained"} and seed == 1 else "done"

    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "trained")}
    heads = effect(study(tmp_path, factors=factors, status=status).effects("loss"), "heads=mqa")
    assert heads.tested
    assert heads.over_seeds is None


@pytest.mark.parametrize(
    ("compare", "name", "trials", "groups"),
    [
        (main_effects, "heads=mqa", 2, 4),
        (interactions, "heads=mqa and sharing=trained", 4, 2),
    ],
)
def test_a_detectable_difference_is_found_with_the_stated_power(compare, name, trials, groups):
    """At the true error, which a report estimates: of ``trials`` in each of so many groups.

    With the degrees of freedom as a typical report has them.
    """
    random = np.random.default_rng(14)

    def seen(size):
        cells = Memory.cells(random, {name: size}, 4)
        return effect(compare(cells, Memory.factors, "loss"), name)

    error = Memory.noise * (trials / 4 / groups) ** 0.5
    nothing = [seen(0.0) for _ in range(100)]
    assert nothing[0].groups == groups
    df = float(np.median([one.estimate.df for one in nothing]))
    stated = smallest_detectable(error, df, nothing[0].tests)
    found = [seen(stated) for _ in range(600)]
    typical = np.mean([one.estimate.error**2 for one in found]) ** 0.5
    assert typical == pytest.approx(error, rel=0.05)
    assert POWER - 0.05 <= np.mean([one.called for one in found]) <= POWER + 0.05
    covered = [one.estimate.low <= stated <= one.estimate.high for one in found]
    assert 0.93 <= np.mean(covered) <= 0.98


def test_full_designs_agree_with_least_squares():
    """Main effects and interactions of a balanced design against statsmodels, seed by seed."""
    import pandas as pd
    import statsmodels.formula.api as smf

    factors = {"a": ("a0", "a1"), "b": ("b0", "b1", "b2")}
    random = np.random.default_rng(15)
    cells, records = {}, []
    for levels in itertools.product(*factors.values()):
        for seed in range(3):
            loss = float(random.normal(4, 0.1))
            row = TrialRow(
                levels, seed, f"{levels}{seed}", "done", f"{levels}{seed}", {"loss": loss}
            )
            cells.setdefault(levels, {})[seed] = row
            records.append({"a": levels[0], "b": levels[1], "seed": seed, "loss": loss})
    frame = pd.DataFrame(records)
    mains = smf.ols("loss ~ a + b + C(seed)", frame).fit().params
    for one in main_effects(cells, factors, "loss"):
        ((factor, level),) = one.change
        expected = mains[f"{factor}[T.{level}]"]
        assert one.estimate.value == pytest.approx(expected, rel=1e-9, abs=1e-9)
    both = smf.ols("loss ~ a * b + C(seed)", frame).fit().params
    for one in interactions(cells, factors, "loss"):
        expected = both[":".join(f"{f}[T.{level}]" for f, level in one.change)]
        assert one.estimate.value == pytest.approx(expected, rel=1e-9, abs=1e-9)
