"""The sharing patterns: the contract, their published groupings, and how owner maps merge."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.sharing import SharingError, merge_owner_maps, owner_map, tied_slots
from tests.contracts.sharing_pattern_contract import SharingPatternContract


def shared_groups(owners):
    """The groups of more than one layer."""
    groups = {}
    for layer, owner in enumerate(owners):
        groups.setdefault(owner, []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


class TestPatterns(SharingPatternContract):
    pass


@pytest.mark.parametrize(("number", "owners"), [(2, 10), (3, 7), (4, 5)])
def test_the_number_of_owners_of_adjacent_layers_rounds_up(number, owners):
    assert len(set(owner_map(f"adjacent:{number}", "G" * 20))) == owners


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


def test_groups_and_owner_maps_say_the_same():
    assert owner_map([[0, 2], [3, 1]], "GGGG") == owner_map([0, 1, 0, 1], "GGGG") == (0, 1, 0, 1)


@st.composite
def owner_maps(draw, layers=8):
    owners = []
    for layer in range(layers):
        roots = [i for i, owner in enumerate(owners) if owner == i]
        owners.append(draw(st.sampled_from([*roots, layer])))
    return tuple(owners)


@settings(max_examples=40, deadline=None)
@given(first=owner_maps(), second=owner_maps())
def test_merging_joins_exactly_what_either_joins(first, second):
    merged = merge_owner_maps(first, second)
    links = {(i, o) for owners in (first, second) for i, o in enumerate(owners)}
    reach = {i: {i} for i in range(8)}
    for _ in range(8):  # transitive closure, the slow way
        for a, b in links:
            both = reach[a] | reach[b]
            for member in both:
                reach[member] |= both
    assert merged == tuple(min(reach[i]) for i in range(8))


def test_a_tie_that_would_hide_a_trained_owner_is_refused():
    trained = owner_map([[0, 2]], "GGG")
    with pytest.raises(SharingError, match="layer 1 overwrite the K/V of layer 0 before layer 2"):
        tied_slots(trained, owner_map([[0, 1]], "GGG"), "overwrite")
    assert tied_slots(trained, owner_map([[0, 1]], "GGG"), "owner") == (0, 0, 0)
