"""What every mixer but attention must do. A member's tests inherit `MixerContract`."""

import pytest
import torch

from kvlab.errors import SpecError
from kvlab.layout import KVLayout, decode_flops, forward_flops, parameter_count
from kvlab.model import GPT
from kvlab.own_extensions import find_members
from kvlab.spec import ModelConfig, ServingConfig, load_served_model
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.mixers import find_mixer
from tests.contracts.kv_form_contract import CHECKS
from tests.support.extensions import needs
from tests.support.prefixes import copy_prefix
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 41, "block_size": 160, "n_layer": 4, "n_head": 4, "n_kv_head": 2,
         "n_embd": 32, "position": "rope", "window": 7}  # fmt: skip
BLOCKS = [{"kv_dtype": "kivi2", "kv_group": 8, "kv_residual": 4}] if "kivi2" in DTYPES else []
SERVINGS = [{}, {"kv_dtype": "int8"}, *BLOCKS,
            *({key: value} for key, value in find_members("checked_servings").items())]  # fmt: skip
START = 40


class MixerContract:
    """Give the `name` of a mixer in `MIXERS`. ``M`` is a layer of it in patterns."""

    name: str
    tolerance = 1e-10

    def config(self, pattern="MMLG", **more):
        shape = {**SHAPE, "kinds": {"M": {"mixer": self.name}}, **more}
        if "L" not in pattern:
            del shape["window"]
        return ModelConfig(attention_pattern=pattern, **shape)

    def model(self, pattern="MMLG", **more):
        return random_model(self.config(pattern, **more), std=0.3).eval()

    @pytest.fixture
    def tokens(self):
        return torch.randint(0, START, (3, 150), generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("pattern", ["M", "MMLG", "GM"])
    @torch.inference_mode()
    def test_one_shot_equals_chunks_and_single_tokens(self, pattern, tokens):
        model = self.model(pattern)
        expected, cache = model(tokens), model.new_cache(3, 150)
        for splits in ([1] * 150, [3, 90, 1, 1, 55], [150]):
            cache.reset()
            got = torch.cat([model(part, cache=cache) for part in tokens.split(splits, 1)], 1)
            assert (got - expected).abs().max() < self.tolerance

    @torch.inference_mode()
    def test_rows_of_any_lengths_equal_each_alone(self, tokens):
        model = self.model()
        cache, ends = model.new_cache(3, 150), [0, 0, 0]
        for lengths in ([5, 0, 2], [1, 1, 0], [70, 3, 100], [1, 1, 1], [0, 1, 0]):
            count = max(lengths)
            part = torch.zeros(3, count, dtype=torch.int64)
            for row, (end, new) in enumerate(zip(ends, lengths, strict=True)):
                part[row, :new] = tokens[row, end : end + new]
            logits = model(part, cache=cache, lengths=lengths)
            for row, new in enumerate(lengths):
                ends[row] += new
                if not new:
                    continue
                alone = model(tokens[row : row + 1, : ends[row]])[0, ends[row] - new :]
                assert (logits[row, :new] - alone).abs().max() < self.tolerance

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_it_holds(self, check):
        check(self.config(), ServingConfig())

    @needs("check")
    @pytest.mark.parametrize("serving", SERVINGS, ids=str)
    def test_a_cache_takes_its_bytes_and_splits_change_nothing(self, serving):
        CHECKS["chunks equal single tokens, in the declared bytes"](
            self.config(), ServingConfig(**serving)
        )

    def test_its_state_grows_with_no_token(self):
        plan = KVLayout.of(self.config("M")).plans[0]
        assert plan.stored_bytes(10, "bfloat16") == plan.stored_bytes(10**6, "float32") > 0
        assert plan.growth_bytes("float32") == plan.token_bytes("float32") == 0

    def test_parameters_and_flops_count_every_weight(self):
        for bias in (False, True):
            config, tokens = self.config("MG", bias=bias), 50
            model, mixer = GPT(config), find_mixer(self.name)
            assert parameter_count(config) == sum(p.numel() for p in model.parameters())
            weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
            mixed = 2 * mixer.products(config.layers[0], tokens)
            attended = 2 * config.layers[1].mixer.products(config.layers[1], tokens)
            assert forward_flops(config, tokens) == tokens * 2 * (weights + mixed + attended)
            assert decode_flops(config, tokens) == 2 * (weights + attended) + 2 * (
                mixer.decode_flops(config.layers[0], tokens)
            )

    def test_documents_in_a_row_are_computed_as_if_each_stood_alone(self, tokens):
        packed, alone = self.model(), self.model()
        starts = [[0, 3, 64, 65, 149], [0], [0, 70, 128]]
        for row, own in enumerate(starts):
            tokens[row, own] = START
        tokens[1, 0] = 5
        hidden = packed.hidden_states(tokens, document_start=START)
        (hidden.square().sum() / 100).backward()
        for row, own in enumerate(starts):
            for start, end in zip(own, [*own[1:], 150], strict=True):
                states = alone.hidden_states(tokens[row : row + 1, start:end])
                assert (hidden[row, start:end] - states[0]).abs().max() < self.tolerance
                (states.square().sum() / 100).backward()
        for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
            assert (one.grad - other.grad).abs().max() < 1e-8

    @pytest.mark.parametrize("length", [64, 100])
    @torch.inference_mode()
    def test_a_prefix_goes_on_from_its_snapshot(self, tokens, length):
        model, text = self.model(), tokens[:1, :140]
        caches = [model.new_cache(1, 150) for _ in range(3)]
        model(text[:, :length], cache=caches[0])
        copy_prefix(caches[0], caches[1])
        rest = model(text[:, length:], cache=caches[1])
        cold = model(text, cache=caches[2])[:, length:]
        assert (rest - cold).abs().max() < self.tolerance

    def test_what_cannot_hold_is_refused(self):
        pattern = {"model.attention_pattern": "MMGG", "model.n_layer": 4}
        pattern |= {"model.kinds.M.mixer": self.name}
        cases = [
            ({"model.kv_sharing": "adjacent:2"}, "joins layers 0 and 1, whose states are not for"),
            ({"serving.tie": "adjacent:2"}, "joins layers 0 and 1, whose states are not for"),
            ({"serving.compile": True}, "leave it out, or use a pattern of G and L alone"),
            ({"model.kinds.M.window": 3}, f"is not read by mixer {self.name}; leave it out"),
            ({"model.attention_pattern": "M", "serving.kv_dtype": "int8"}, "is of tokens, and no"),
        ]
        for changes, message in cases:
            with pytest.raises(SpecError, match=message):
                load_served_model("gpt2", {**pattern, **changes})
        load_served_model("gpt2", {**pattern, "model.kv_sharing": [[2, 3]]})
