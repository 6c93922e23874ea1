"""What every cache format must do: `CacheFormatContract` tries each one of the table."""

import pytest
import torch

from kvlab.cache.formats import get_format
from kvlab.layout import KVLayout
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.dtypes import DTYPES, BlockDType
from tests.support.random_model import random_model

SHAPE = (2, 3, 8, 16)
CPU = torch.device("cpu")
HYBRID = ModelConfig(vocab_size=29, n_layer=6, n_head=4, n_kv_head=2, n_embd=32, block_size=64,
                     position="rope", attention_pattern="GLL", window=6)  # fmt: skip


LARGEST_ERRORS = {
    "float64": 0.0, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "int8": 1.01 / 254, "fp8": 1.01 / 16, "int4": 1.01 / 14,
}  # fmt: skip
"""Of a value, as a part of the largest magnitude of its vector: half a step, and of codes the
rounding of the scale. Formats that quantize tokens in blocks have tests in tests/extensions/kivi."""


@pytest.mark.parametrize(
    "kv_dtype", [name for name, dtype in DTYPES.items() if not isinstance(dtype, BlockDType)]
)
class CacheFormatContract:
    def values(self):
        torch.manual_seed(0)
        values = torch.randn(SHAPE, dtype=torch.float64) * 100
        values[0, 0, 0] = 0.0
        return values

    def test_a_buffer_takes_the_bytes_of_the_formula_and_encoded_values_fit(self, kv_dtype):
        kv_format = get_format(kv_dtype)
        tensors = kv_format.allocate(SHAPE, CPU)
        assert all(tensor.shape[:3] == SHAPE[:3] and not tensor.any() for tensor in tensors)
        rows, heads, entries, head_dim = SHAPE
        vectors = rows * heads * entries
        expected = vectors * DTYPES[kv_dtype].vector_bytes(head_dim)
        assert sum(tensor.nbytes for tensor in tensors) == expected
        encoded = kv_format.encode(self.values())
        assert [(t.shape, t.dtype) for t in tensors] == [(t.shape, t.dtype) for t in encoded]

    def test_decoded_values_are_near_and_zeros_stay_zero(self, kv_dtype):
        kv_format = get_format(kv_dtype)
        values = self.values()
        decoded = kv_format.decode(kv_format.encode(values), torch.float64)
        assert decoded.dtype == torch.float64
        assert decoded[0, 0, 0].abs().max() == 0
        magnitude = values.abs().amax(-1, keepdim=True)
        error = (decoded - values).abs()
        assert (error <= magnitude * LARGEST_ERRORS[kv_dtype]).all()
        assert (error.max() > 0) == (LARGEST_ERRORS[kv_dtype] > 0)
        assert kv_format.decode(kv_format.encode(values), torch.bfloat16).dtype == torch.bfloat16

    def test_a_token_is_encoded_alone_as_among_others(self, kv_dtype):
        kv_format = get_format(kv_dtype)
        values = self.values()
        whole, one = kv_format.encode(values), kv_format.encode(values[:, :, 3:4])
        assert all(torch.equal(w[:, :, 3:4], o) for w, o in zip(whole, one, strict=True))

    def test_what_is_attended_to_does_not_depend_on_the_chunks(self, kv_dtype):
        model = random_model(HYBRID)
        text = torch.randint(0, 29, (1, 30), generator=torch.Generator().manual_seed(0))
        serving = ServingConfig.model_construct(kv_dtype=kv_dtype)
        with torch.no_grad():
            whole = model(text, cache=model.new_cache(1, 30, serving))
            cache = model.new_cache(1, 30, serving)
            steps = torch.cat([model(text[:, i : i + 1], cache=cache) for i in range(30)], 1)
            one_shot = model(text)
        assert (steps - whole).abs().max() < 1e-10
        error = (whole - one_shot).abs().max()
        assert error < 1.0
        assert (error > 1e-6) == (LARGEST_ERRORS[kv_dtype] > 1e-6)
        assert cache.nbytes == KVLayout.of(HYBRID, serving).stored_bytes(1, 30, "float64")
