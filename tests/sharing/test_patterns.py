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


class TestAdjacent(SharingPatternContract):
    name = "adjacent"

    @pytest.mark.parametrize(("number", "owners"), [(2, 10), (3, 7), (4, 5)])
    def test_the_number_of_owners_rounds_up(self, number, owners):
        assert len(set(owner_map(f"adjacent:{number}", "G" * 20))) == owners


class TestCharacterAI(SharingPatternContract):
    name = "character-ai"
    fits_any_layers = False  # blocks of six are not of one kind in every model


class TestTrailing(SharingPatternContract):
    name = "trailing"
    fits_any_layers = False  # an owner of each kind must stay below the last layers


class TestSandwich(SharingPatternContract):
    name = "sandwich"


@pytest.mark.parametrize(
    ("pattern", "kinds", "groups"),
    [
        ("none", "GLLG", []),
        ("adjacent:2", "GLGLGLGL", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("character-ai", "GLLLLL" * 2, [[0, 6], [1, 2, 3], [4, 5], [7, 8, 9], [10, 11]]),
        ("trailing:4", "GLGLGLGL", [[2, 4, 6], [3, 5, 7]]),
        ("sandwich", "GLGLGLGL", [[2, 4], [3, 5]]),
        ("sandwich", "G" * 20, [list(range(1, 19))]),
    ],
)
def test_layers_are_grouped_within_their_kind_as_published(pattern, kinds, groups):
    assert shared_groups(owner_map(pattern, kinds)) == groups


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
