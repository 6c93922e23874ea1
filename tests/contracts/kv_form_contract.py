"""What every K/V form must do. A member's tests inherit `KVFormContract`."""

import pytest
import torch

from kvlab.layout import KVLayout, decode_flops, forward_flops, parameter_count
from kvlab.model import GPT
from kvlab.model.generate import EagerDecoder, StaticDecoder
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 41, "block_size": 64, "n_layer": 3, "n_head": 4, "n_embd": 32,
         "position": "rope", "attention_pattern": "GLL", "window": 7}  # fmt: skip
SERVINGS = [{}, {"kv_dtype": "int8"}, {"tie": "adjacent:2"}, {"evict": {"keep": 9, "sinks": 2}}]


class KVFormContract:
    """Give `changes` to a model, and `numbers` that a token stores in one of its layers."""

    changes: dict
    numbers: int

    def config(self, **more):
        return ModelConfig(**{**SHAPE, **self.changes, **more})

    @pytest.fixture
    def tokens(self):
        return torch.randint(0, 41, (2, 20), generator=torch.Generator().manual_seed(1))

    def test_a_token_stores_as_many_numbers_as_is_said(self):
        assert KVLayout.of(self.config()).plans[0].token_bytes("float32") == 4 * self.numbers

    @torch.inference_mode()
    def test_cached_logits_of_chunks_steps_and_static_steps_are_the_one_shot_logits(self, tokens):
        model = random_model(self.config(), std=0.3)
        caches = [model.new_cache(2, 20) for _ in range(2)]
        decoders = [EagerDecoder(model, caches[0]), StaticDecoder(model, caches[1])]
        steps = [[model(tokens[:, :4], cache=cache)] for cache in caches]
        for token in tokens[:, 4:].T:
            for step, decoder in zip(steps, decoders, strict=True):
                step.append(decoder(token)[:, None].clone())
        for step in steps:
            assert (torch.cat(step, 1) - model(tokens)).abs().max() < 1e-10

    @pytest.mark.parametrize("serving", SERVINGS, ids=str)
    @torch.inference_mode()
    def test_a_cache_takes_its_bytes_and_splits_change_nothing(self, tokens, serving):
        how, model = ServingConfig(**serving), random_model(self.config(), std=0.3)
        cache = model.new_cache(2, 20, how)
        assert cache.nbytes == KVLayout.of(model.config, how).stored_bytes(2, 20, "float64")
        by_token = [model(tokens[:, i : i + 1], cache=cache) for i in range(20)]
        if "tie" not in serving:  # tied, a layer reads its own K/V of the tokens of one pass
            cache.reset()
            split = [model(part, cache=cache) for part in tokens.split([7, 1, 12], 1)]
            assert (torch.cat(by_token, 1) - torch.cat(split, 1)).abs().max() < 1e-10

    def test_flops_and_parameters_count_every_weight_and_every_pair(self):
        config = self.config(attention_pattern="G", window=None)
        model, tokens, layer = GPT(config), 50, config.layers[0]
        assert parameter_count(config) == sum(p.numel() for p in model.parameters())
        weights = sum(p.numel() for name, p in model.named_parameters()
                      if p.dim() == 2 and "position" not in name)  # fmt: skip
        heads = 3 * layer.n_head * (layer.key_dim + layer.head_dim)
        assert forward_flops(config, tokens) == tokens * 2 * (weights + heads * tokens)
        attended = 3 * layer.kv_form.flops_per_key(layer) * tokens
        assert decode_flops(config, tokens) == 2 * weights + attended

    def test_gradients_reach_every_weight(self, tokens):
        model = random_model(self.config(), std=0.3)
        model(tokens).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().max() > 0
