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


def test_levels_without_a_partner_are_not_guessed(tmp_path):
    """Two factors that always move together cannot be told apart."""

    def exclude(levels):
        return (levels["heads"] == "mqa") != (levels["position"] == "rope")

    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}
    found = study(tmp_path, factors=factors, exclude=exclude).effects("loss")
    assert {one.verdict for one in found} == {"no matched pair"}
