"""What every position scheme must do. A member's tests inherit `PositionSchemeContract`."""

import pytest
import torch

from kvlab.layout import parameter_count
from kvlab.model import GPT
from kvlab.spec import ModelConfig

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 24, "attention_pattern": "GL", "window": 5}  # fmt: skip


class PositionSchemeContract:
    """Give `name`, its name in the table, and whether the order of earlier tokens matters."""

    name: str
    sees_order = True

    @pytest.fixture
    def model(self):
        return GPT(ModelConfig(**SHAPE, position=self.name), seed=0, dtype=torch.float64).eval()

    @pytest.fixture
    def tokens(self):
        return torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def test_cached_logits_are_the_one_shot_logits_and_the_formula_counts_it(self, model, tokens):
        assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())
        cache = model.new_cache(2, 24)
        chunks = [model(tokens[:, start : start + 3], cache=cache) for start in range(0, 24, 3)]
        torch.testing.assert_close(torch.cat(chunks, 1), model(tokens), atol=1e-10, rtol=0)

    @torch.no_grad()
    def test_the_order_of_earlier_tokens_matters_if_there_are_positions(self, tokens):
        # causal layers tell the order of tokens, except in one layer without a window
        one_layer = {**SHAPE, "n_layer": 1, "attention_pattern": "G", "window": None}
        config = ModelConfig(**one_layer, position=self.name)
        model = GPT(config, seed=0, dtype=torch.float64).eval()
        swapped = tokens[:, [1, 0, *range(2, 24)]]
        difference = (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max().item()
        assert (difference > 1e-6) == self.sees_order
