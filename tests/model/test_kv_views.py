"""K and V as views of what a token stores."""

import pytest
import torch

from kvlab.model import decode_attention
from kvlab.model.attention_backends import scaled_dot_product
from kvlab.model.decode_attention import Keys
from kvlab.model.rope import apply_rope, make_rope_table
from kvlab.spec import ModelConfig
from tests.contracts.kv_form_contract import SHAPE, KVFormContract


class TestSeparate(KVFormContract):
    changes, numbers = {"n_kv_head": 2}, 2 * 2 * 8


def test_flops_of_a_key():
    layer = ModelConfig(**SHAPE).layers[0]
    assert layer.kv_form.flops_per_key(layer) == 2 * 4 * (8 + 8)


@pytest.mark.parametrize("block", [1, 2**17])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_keys_that_are_rotated_in_blocks_are_those_that_are_rotated_at_once(
    monkeypatch, block, rotary_dim
):
    monkeypatch.setattr(decode_attention, "BLOCK_NUMBERS", block)
    draw = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(3, 2, n, 8, generator=draw, dtype=torch.float64) for n in (4, 9))
    sink = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    for positions in (torch.arange(9), torch.arange(27).view(3, 9)):  # also of rows that differ
        table = make_rope_table(positions, rotary_dim, 100.0, torch.float64)
        keys = Keys(kv, table)
        mask = torch.rand(3, 1, 1, 9, generator=draw) < 0.7
        mask[..., 0] = True
        for visible, logits in ((None, None), (mask, sink)):
            actual = decode_attention.attend_blocks(q, keys, kv, visible, logits)
            rotated = apply_rope(kv, table)
            expected = scaled_dot_product(q, rotated, kv, visible, sink=logits)
            assert (actual - expected).abs().max() < 1e-12


def test_shared_numbers_of_half_precision_keys_are_not_rounded_with_the_mask():
    """Beside a V that is larger than they, keys are joined: their scores stay in float32."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, 3, 48).bfloat16()
    shared, kv = torch.randn(2, 1, 50, 32).bfloat16(), torch.randn(2, 2, 50, 32).bfloat16()
    keys = Keys(kv, shared=shared, width=16)
    actual = decode_attention.attend_decoded(q, keys, kv, None, None, None)
    expected = scaled_dot_product(q, keys.to_dense(q.dtype), kv, None)
    assert torch.equal(actual, expected)
