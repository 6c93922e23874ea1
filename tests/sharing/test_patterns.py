"""The sharing patterns: the contract, their published groupings, and how owner maps merge."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.errors import SpecError
from kvlab.layout import KVLayout
from kvlab.sharing import PATTERNS, SharingError, merge_owner_maps, owner_map, tied_slots
from kvlab.spec import ServingConfig, load_served_model

KINDS = st.text("GL", min_size=1, max_size=30)


def written(name: str, number: int = 2) -> str:
    """Return a pattern as a spec writes it."""
    return f"{name}:{number}" if ":" in PATTERNS[name].usage else name


@pytest.mark.parametrize("name", PATTERNS)
class TestPatterns:
    of_some_layers = ("character-ai", "trailing")
    """Patterns that refuse layers of some kinds: where blocks of six are not of one kind, and where
    no owner of a kind is below the last layers."""

    # every name runs the one inherited test
    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(kinds=KINDS, number=st.integers(1, 9))
    def test_it_gives_a_valid_owner_map_or_refuses(self, name, kinds, number):
        try:
            owners = owner_map(written(name, number), kinds)
        except SharingError:
            assert name in self.of_some_layers
            return
        assert len(owners) == len(kinds)
        for layer, owner in enumerate(owners):
            assert owner <= layer
            assert owners[owner] == owner
            assert kinds[owner] == kinds[layer]

    def test_a_number_is_needed_or_refused_and_its_usage_says_so(self, name):
        assert PATTERNS[name].usage.partition(":")[0] == name
        wrong = name if ":" in PATTERNS[name].usage else f"{name}:2"
        for sharing in (wrong, f"{name}:x"):
            with pytest.raises(SharingError, match="number"):
                owner_map(sharing, "G" * 12)
        with pytest.raises(SpecError, match=f"use .*{name}"):
            load_served_model("gpt2", {"model.kv_sharing": "zigzag"})

    def test_a_spec_names_it_in_training_and_in_serving(self, name):
        trained = load_served_model("gpt2", {"model.kv_sharing": written(name)})
        tied = load_served_model("gpt2", {"serving.tie": written(name)})
        assert trained.model.kv_owners == KVLayout.of(tied.model, tied.serving).owners
        plain = KVLayout.of(tied.model, ServingConfig()).stored_bytes(1, 64)
        stored = KVLayout.of(tied.model, tied.serving).stored_bytes(1, 64)
        assert stored == plain * len(set(trained.model.kv_owners)) // 12


def shared_groups(owners):
    """The groups of more than one layer."""
    groups = {}
    for layer, owner in enumerate(owners):
        groups.setdefault(owner, []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


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


@settings(max_examples=40)
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
