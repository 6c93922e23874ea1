"""What every sharing pattern must do. A member's tests inherit `SharingPatternContract`."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.errors import SpecError
from kvlab.layout import KVLayout
from kvlab.sharing import PATTERNS, SharingError, owner_map
from kvlab.spec import ServingConfig, load_served_model

KINDS = st.text("GL", min_size=1, max_size=30)


class SharingPatternContract:
    """Give `name`, its name in the table, and whether it fits any layers."""

    name: str
    fits_any_layers = True

    def written(self, number: int = 2) -> str:
        """The pattern as a spec writes it."""
        return f"{self.name}:{number}" if PATTERNS[self.name].takes_number else self.name

    # every member's class runs the one inherited test
    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(kinds=KINDS, number=st.integers(1, 9))
    def test_it_gives_a_valid_owner_map_or_refuses(self, kinds, number):
        try:
            owners = owner_map(self.written(number), kinds)
        except SharingError:
            assert not self.fits_any_layers
            return
        assert len(owners) == len(kinds)
        for layer, owner in enumerate(owners):
            assert owner <= layer
            assert owners[owner] == owner
            assert kinds[owner] == kinds[layer]

    def test_a_number_is_needed_or_refused_and_its_usage_says_so(self):
        assert PATTERNS[self.name].usage.partition(":")[0] == self.name
        wrong = self.name if PATTERNS[self.name].takes_number else f"{self.name}:2"
        for sharing in (wrong, f"{self.name}:x"):
            with pytest.raises(SharingError, match="number"):
                owner_map(sharing, "G" * 12)
        with pytest.raises(SpecError, match=f"use .*{self.name}"):
            load_served_model("gpt2", {"model.kv_sharing": "zigzag"})

    def test_a_spec_names_it_in_training_and_in_serving(self):
        trained = load_served_model("gpt2", {"model.kv_sharing": self.written()})
        tied = load_served_model("gpt2", {"serving.tie": self.written()})
        assert trained.model.kv_owners == KVLayout.of(tied.model, tied.serving).owners
        plain = KVLayout.of(tied.model, ServingConfig())
        stored = KVLayout.of(tied.model, tied.serving).stored_bytes(1, 64)
        assert stored == plain.stored_bytes(1, 64) * len(set(trained.model.kv_owners)) // 12
