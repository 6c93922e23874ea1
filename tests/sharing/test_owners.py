"""Owner maps: explicit groups and owners, the rules, merging and ties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.sharing import SharingError, merge_owner_maps, owner_map, tied_slots


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
