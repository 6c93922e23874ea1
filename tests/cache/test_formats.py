"""The cache formats against their contract, and how one is added."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.cache.formats import ScaledCodes, convert_codes, get_format
from kvlab.layout import KVLayout
from kvlab.model import GPT, attention_backends, decode_attention
from kvlab.model.generate import EagerDecoder, StaticDecoder, prefill
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
class TestFormats:
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


class Divisors(TorchDispatchMode):
    """Keep what tensors are divided by inside."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        if function is torch.ops.aten.div.Tensor:
            self.kept.append(args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_a_device_divides_by_tensors_alone(kv_dtype):
    check_divisors(kv_dtype=kv_dtype)


def check_divisors(**how):
    """By a number CUDA multiplies with its reciprocal, and other codes than a CPU's come out."""
    model = GPT(
        ModelConfig(vocab_size=60, block_size=24, n_layer=1, n_head=2, n_embd=16), device="meta"
    )
    cache = model.new_cache(1, 12, ServingConfig(**how))
    with torch.inference_mode(), Divisors() as divisors:
        prefill(model, torch.zeros(1, 12, dtype=torch.int64, device="meta"), cache)
    assert divisors.kept
    assert all(isinstance(by, torch.Tensor) for by in divisors.kept)


def test_every_float8_code_is_converted_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        converted = convert_codes(codes, dtype)
        assert torch.equal(converted, codes.to(dtype))
        assert torch.equal(converted.signbit(), codes.float().signbit())


@pytest.mark.parametrize(
    ("name", "group"), [("int8", None), ("fp8", None), ("int8", 4), ("int4", 4), ("int4", 8)]
)
def test_attention_to_codes_is_attention_to_what_they_stand_for(name, group, monkeypatch):
    """In chunks of two heads, and with entries that are not in use."""
    torch.manual_seed(0)
    k, v = (get_format(name, group).encode(torch.randn(3, 2, 9, 8)) for _ in range(2))
    q = torch.randn(3, 2, 4, 8)
    masks = None, (torch.arange(7) < torch.tensor([7, 3, 1])[:, None])[:, None, None]
    views = [ScaledCodes(*(t[:, :, :7] for t in part)) for part in (k, v)]
    monkeypatch.setattr(decode_attention, "BLOCK_NUMBERS", 2 * 7 * 8)
    for mask in masks:
        keys = decode_attention.Keys(views[0])
        actual = decode_attention.attend_blocks(q, keys, views[1], mask)
        k, v = (view.decode() for view in views)
        expected = attention_backends.scaled_dot_product(q, k, v, mask)
        assert (actual - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kv", "serving"),
    [("separate", {"kv_dtype": "int8"}), ("separate", {"kv_dtype": "int4", "kv_group": 4})],
)
def test_one_token_reads_codes_and_only_the_entries_in_use(kv, serving, monkeypatch):
    check_one_token(kv, serving, monkeypatch)


def check_one_token(kv, serving, monkeypatch):
    """Whatever K and V are, no decoded copy of a buffer is made. In half precision products would
    be rounded before they are scaled."""
    entries, convert = [], decode_attention._convert

    def watch(stored, heads, dtype):
        if isinstance(stored, ScaledCodes):
            entries.append(stored.shape[1])
        return convert(stored, heads, dtype)

    monkeypatch.setattr(decode_attention, "_convert", watch)
    monkeypatch.setattr(decode_attention, "BLOCK_NUMBERS", 1)
    config = ModelConfig(vocab_size=9, block_size=600, n_layer=1, n_head=2, n_embd=32,
                         position="rope", kv=kv)  # fmt: skip
    text = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for dtype, decoder, read in (
        (torch.float32, EagerDecoder, {4}), (torch.float32, StaticDecoder, {4}),
        (torch.bfloat16, EagerDecoder, set()),
    ):  # fmt: skip
        model = GPT(config, dtype=dtype).eval()
        cache = model.new_cache(2, 600, ServingConfig(**serving))
        with torch.inference_mode():
            prefill(model, text, cache)
            entries.clear()
            decoder(model, cache)(torch.tensor([4, 7]))
        assert set(entries) == read
