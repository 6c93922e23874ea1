"""What every position scheme must do: `PositionSchemeContract` tries each one of the table."""

import pytest
import torch

from kvlab.spec import ModelConfig
from kvlab.spec.layer_config import POSITIONS
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 24}


@pytest.mark.parametrize("name", POSITIONS)
class PositionSchemeContract:
    """The fuzzer draws every scheme, and compares caches and parameters (`test_fuzz_model.py`)."""

    without_order = ("none",)
    """Schemes by which one layer does not tell the order of earlier tokens."""

    @torch.no_grad()
    def test_the_order_of_earlier_tokens_matters_if_there_are_positions(self, name):
        model = random_model(ModelConfig(**SHAPE, n_layer=1, position=name))
        tokens = torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(0))
        swapped = tokens[:, [1, 0, *range(2, 24)]]
        difference = (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max().item()
        assert (difference > 1e-6) == (name not in self.without_order)
