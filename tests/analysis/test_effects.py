"""Matched comparisons: what is paired, what is not, and whether known effects are found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.analysis.matched_pairs import Setting, largest_balanced_block
from kvlab.analysis.study import Study
from tests.support.record_factory import EFFECTS, Record


def study(tmp_path, **changes):
    record = Record(**changes)
    return Study.load(record.write(tmp_path / "store"), record.name)


def effect(found, name):
    return next(one for one in found if one.name == name)


@given(st.data())
def test_the_block_has_every_pair_of_its_seeds(data):
    """Whatever is missing: all groups kept are whole, and no single seed or group has more."""
    seen = data.draw(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6))
    groups = [
        [Setting((str(n),), dict.fromkeys(sorted(seeds), 0.1), frozenset({str(n)}), 1.0)]
        for n, seeds in enumerate(seen)
    ]
    kept = largest_balanced_block(groups)
    sizes = {tuple(setting.differences) for group in kept for setting in group}
    assert len(sizes) == 1
    (seeds,) = sizes
    pairs = len(kept) * len(seeds)
    if len(seeds) > 1:
        assert pairs >= max(map(len, seen))
        assert pairs >= len(set.intersection(*seen)) * (len(seen) if len(seeds) > 1 else 1) or (
            len(set.intersection(*seen)) < 2
        )
    else:
        assert all(len(one) == 1 for one in seen)


def test_a_missing_seed_does_not_shift_a_group(tmp_path):
    """`tied` differs by 1.5 from `none`; losing it at one seed must not move the mean there."""

    def status(levels, seed):
        return "missing" if levels["sharing"] == "tied" and seed == 0 else "done"

    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
    heads = effect(study(tmp_path, factors=factors, status=status).effects("loss_served"),
                   "heads=mqa")  # fmt: skip
    assert heads.estimate.value == pytest.approx(EFFECTS["mqa"], abs=0.02)
    assert heads.pairs_used == 3


def test_one_seed_claims_nothing_and_two_quote_no_detectable_difference(tmp_path):
    heads = effect(study(tmp_path, seeds=(0,)).effects("loss"), "heads=mqa")
    assert heads.verdict == "one seed: not tested"
    assert not heads.is_significant
    assert heads.detectable is None
    assert heads.estimate.value == pytest.approx(EFFECTS["mqa"], abs=0.02)
    found = study(tmp_path / "two", seeds=(0, 1), factors={"heads": ("mha", "mqa")}).effects("loss")
    assert effect(found, "heads=mqa").is_tested
    assert effect(found, "heads=mqa").detectable is None


class Planted(Record):
    """One K/V head costs 0.06 more beside trained sharing."""

    def loss(self, levels, seed):
        extra = levels["heads"] == "mqa" and levels["sharing"] == "trained"
        return super().loss(levels, seed) + (0.06 if extra else 0.0)


def plant(tmp_path, *sharing):
    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope"), "sharing": sharing}
    record = Planted(seeds=tuple(range(6)), factors=factors)
    return Study.load(record.write(tmp_path), "made")


def test_a_level_whose_settings_disagree_is_estimated_beside_each(tmp_path):
    found = {one.name: one for one in plant(tmp_path, "none", "trained").effects("loss")}
    alone, beside = (found[f"heads=mqa at sharing={level}"] for level in ("none", "trained"))
    assert alone.at == (("sharing", "none"),)
    assert alone.low <= EFFECTS["mqa"] <= alone.high
    assert beside.low <= EFFECTS["mqa"] + 0.06 <= beside.high
    assert alone.high < beside.low
    assert alone.over_all.value == pytest.approx((alone.value + beside.value) / 2)
    assert [len(one.by_setting) for one in (alone, beside)] == [2, 2], "over both positions"
    sharing = [found[f"sharing=trained at heads={level}"] for level in ("mha", "mqa")]
    assert [one.value for one in sharing] == pytest.approx([0.08, 0.14], abs=0.02)
    assert found["position=rope"].at == ()
    # every level has a third of the error, which its two parts share
    levels = {name: one.level for name, one in found.items()}
    assert levels.pop("position=rope") == pytest.approx(0.05 / 3)
    assert list(levels.values()) == pytest.approx([0.05 / 6] * 4)


class Cliff(Record):
    """One K/V head is beside rotary positions of two kinds alone, and beside one costs 0.06 more."""

    def loss(self, levels, seed):
        extra = levels["heads"] == "mqa" and levels["position"] == "far"
        return super().loss(levels, seed) + (0.06 if extra else 0.0)


@pytest.mark.parametrize("order", [("heads", "position"), ("position", "heads")])
def test_settings_are_told_apart_where_none_has_the_other_factors_baseline_level(tmp_path, order):
    def exclude(levels):
        return levels["heads"] == "mqa" and levels["position"] == "learned"

    levels = {"heads": ("mha", "mqa"), "position": ("learned", "rope", "far")}
    factors = {factor: levels[factor] for factor in order}
    record = Cliff(seeds=tuple(range(6)), factors=factors, exclude=exclude)
    made = Study.load(record.write(tmp_path), "made")
    (pair,) = made.interactions("loss")
    assert pair.against == (("position", "rope"),)
    assert pair.low <= 0.06 <= pair.high
    assert pair.is_significant
    found = {one.name: one for one in made.effects("loss") if one.claim == "heads=mqa"}
    assert found.keys() == {"heads=mqa at position=rope", "heads=mqa at position=far"}
    for name, cost in zip(found, (EFFECTS["mqa"], EFFECTS["mqa"] + 0.06), strict=True):
        assert found[name].low <= cost <= found[name].high


def test_levels_without_a_partner_are_not_guessed(tmp_path):
    """Two factors that always move together cannot be told apart."""

    def exclude(levels):
        return (levels["heads"] == "mqa") != (levels["position"] == "rope")

    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}
    found = study(tmp_path, factors=factors, exclude=exclude).effects("loss")
    assert {one.verdict for one in found} == {"no matched pair"}
