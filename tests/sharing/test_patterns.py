"""The sharing patterns: the contract, and the groupings that each was published with."""

import pytest

from kvlab.errors import SpecError
from kvlab.layout import KVLayout
from kvlab.sharing import PATTERNS, SharingPattern, owner_map
from kvlab.spec import load_served_model
from tests.contracts.sharing_pattern_contract import SharingPatternContract


def shared_groups(owners):
    """The groups of more than one layer."""
    groups = {}
    for layer, owner in enumerate(owners):
        groups.setdefault(owner, []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


class TestNone(SharingPatternContract):
    name = "none"

    def test_every_layer_owns(self):
        assert owner_map("none", "GLLG") == (0, 1, 2, 3)


class TestAdjacent(SharingPatternContract):
    name = "adjacent"

    @pytest.mark.parametrize(("number", "owners"), [(2, 10), (3, 7), (4, 5)])
    def test_the_number_of_owners_rounds_up(self, number, owners):
        assert len(set(owner_map(f"adjacent:{number}", "G" * 20))) == owners

    def test_layers_are_counted_within_each_kind(self):
        owners = owner_map("adjacent:2", "GLGLGLGL")
        assert shared_groups(owners) == [[0, 2], [1, 3], [4, 6], [5, 7]]


class TestCharacterAI(SharingPatternContract):
    name = "character-ai"
    fits_any_layers = False  # blocks of six are not of one kind in every model

    @pytest.mark.parametrize("kinds", ["GLLLLL" * 2, "G" * 12])
    def test_the_grouping_is_that_of_the_articles_code(self, kinds):
        expected = [[0, 6], [1, 2, 3], [4, 5], [7, 8, 9], [10, 11]]
        assert shared_groups(owner_map("character-ai", kinds)) == expected


class TestTrailing(SharingPatternContract):
    name = "trailing"
    fits_any_layers = False  # an owner of each kind must stay below the last layers

    def test_the_last_layers_read_the_last_owner_of_their_kind(self):
        assert shared_groups(owner_map("trailing:4", "GLGLGLGL")) == [[2, 4, 6], [3, 5, 7]]


class TestSandwich(SharingPatternContract):
    name = "sandwich"

    def test_both_ends_of_each_kind_stand_alone(self):
        assert shared_groups(owner_map("sandwich", "GLGLGLGL")) == [[2, 4], [3, 5]]
        assert len(set(owner_map("sandwich", "G" * 20))) == 3


def test_every_pattern_of_the_table_has_a_contract_test():
    assert {test.name for test in SharingPatternContract.__subclasses__()} == set(PATTERNS)


def test_a_new_pattern_is_a_function_and_a_table_line(monkeypatch):
    def halves(argument, kinds):  # noqa: ARG001
        return [list(range(len(kinds) // 2)), list(range(len(kinds) // 2, len(kinds)))]

    changes = {"model.n_kv_head": 1, "serving.tie": "halves"}
    with monkeypatch.context() as patched:
        patched.setitem(PATTERNS, "halves", SharingPattern("halves", halves))
        served = load_served_model("gpt2", changes)
        assert KVLayout.of(served.model, served.serving).owners == (0,) * 6 + (6,) * 6
        assert load_served_model("gpt2", {"model.kv_sharing": "halves"}).model.kv_owners[-1] == 6
    with pytest.raises(SpecError, match="serving.tie = halves is not a known pattern; use none,"):
        load_served_model("gpt2", changes)
