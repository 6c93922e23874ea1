"""What every sharing pattern must do: `SharingPatternContract` tries each one of the table."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.errors import SpecError
from kvlab.layout import KVLayout
from kvlab.sharing import PATTERNS, SharingError, owner_map
from kvlab.spec import ServingConfig, load_served_model

KINDS = st.text("GL", min_size=1, max_size=30)


def written(name: str, number: int = 2) -> str:
    """Return a pattern as a spec writes it."""
    return f"{name}:{number}" if PATTERNS[name].takes_number else name


@pytest.mark.parametrize("name", PATTERNS)
class SharingPatternContract:
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
        wrong = name if PATTERNS[name].takes_number else f"{name}:2"
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
