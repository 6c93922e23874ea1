"""Int8 products of linear layers: integers bit for bit, gradients as float64 computes them."""

from itertools import compress, product

import numpy as np
import pytest
import torch

from kvlab.extensions.int8_training import int8
from kvlab.extensions.int8_training.config import INT8_PRODUCTS
from kvlab.extensions.int8_training.int8 import (
    INT8_KERNELS,
    Codes,
    Int8Linear,
    multiply,
    quantize,
    select_int8_kernel,
)
from kvlab.model import GPT
from kvlab.model.kernels.cpu_kernel import use_plain_code
from kvlab.spec.model_config import ModelConfig

CPU = torch.device("cpu")
SUBSETS = [flags for flags in product((False, True), repeat=3) if any(flags)]


def draw(*shape, seed=0):
    """Values of very different rows and columns, one row of zeros and some outliers."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))
    x[0], x[-1, -1] = 0, 40
    return x.astype(np.float32)


def code(x, axis):
    """The definition, in numpy: codes in float64 and scales, for values along ``axis``."""
    scale = (np.abs(x).max(axis, keepdims=True) / np.float32(127)).astype(np.float32)
    scale[scale == 0] = 1
    return np.rint(x / scale).astype(np.float64), scale.astype(np.float64)


def multiply_coded(a, b):
    """a (M, K) times b (K, N): exact sums of codes, scaled in float64."""
    (left, rows), (right, columns) = code(a, 1), code(b, 0)
    return left @ right * rows * columns


SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 3, 7), (17, 8, 8), (40, 1100, 33), (300, 64, 24)]
)


@SHAPES
def test_every_kernel_adds_the_integers_exactly(shape):
    for kernel in INT8_KERNELS:
        if kernel != "onednn" or select_int8_kernel(CPU) == "onednn":  # else no VNNI, or plain code
            check_products(kernel, shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@SHAPES
def test_the_kernel_of_a_device_adds_the_integers_exactly(shape):
    check_products(select_int8_kernel(torch.device("cuda")), shape, "cuda")


def check_products(kernel, shape, device="cpu"):
    m, k, n = shape
    rng = np.random.default_rng(k)
    random = [rng.integers(-127, 128, size, dtype=np.int8) for size in ((m, k), (n, k), (k, n))]
    extreme = [np.full(size, sign * 127, np.int8) for sign, size in ((1, (m, k)), (-1, (n, k)))]
    for a, b in ((random[0], random[1].T), (random[0], random[2]), (extreme[0], extreme[1].T)):
        left, right = (torch.from_numpy(codes).to(device) for codes in (a, b))
        found = INT8_KERNELS[kernel](left, right).cpu()
        assert found.dtype == torch.int32
        assert np.array_equal(found.numpy(), a.astype(np.int64) @ b.astype(np.int64))


def test_a_processor_that_saturates_multiplies_in_float32(monkeypatch):
    """Without VNNI oneDNN adds pairs in 16 bits."""

    def saturate(a, b):
        terms = (a[:, :, None].int() + 128) * b[None].int()
        pairs = terms.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(1) - 128 * b.int().sum(0)).int()

    int8._is_onednn_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturate)
    try:
        assert select_int8_kernel(CPU) in ("float32", "integer")
        with use_plain_code():
            assert select_int8_kernel(CPU) == "integer"
    finally:
        int8._is_onednn_exact.cache_clear()


def test_a_nan_or_infinity_is_seen_in_the_product():
    for value in (float("nan"), float("inf")):
        x = torch.ones(2, 4)
        x[1, 2] = value
        out = multiply(quantize(x, 1), quantize(torch.ones(4, 3), 0), select_int8_kernel(CPU))
        assert out[0].tolist() == [4, 4, 4]
        assert not out[1].isfinite().any()


def test_sums_that_int32_cannot_hold_are_added_in_float32():
    a = Codes(torch.full((1, 140_000), 127, dtype=torch.int8), torch.ones(1, 1))
    assert multiply(a, a.mT, "float32").item() == pytest.approx(140_000 * 127**2, rel=1e-7)


@pytest.mark.parametrize("flags", SUBSETS)
@pytest.mark.parametrize("rows", [(7,), (3, 200)])
def test_results_and_gradients_are_those_of_a_float64_model(flags, rows):
    """Each product by itself: codes where it is in int8, the values themselves where not."""
    inputs, outputs = 24, 700
    count = int(np.prod(rows))
    x, w, g = draw(count, inputs), draw(outputs, inputs, seed=1), draw(count, outputs, seed=2)
    b = draw(outputs, 1, seed=3)[:, 0]
    times = [multiply_coded if flag else np.matmul for flag in flags]
    exact = [a.astype(np.float64) if not flags[0] else a for a in (x, w)]
    expected = [
        times[0](exact[0], exact[1].T) + b,
        times[1](*((g, w) if flags[1] else (g.astype(np.float64), w))),
        times[2](*((g.T, x) if flags[2] else (g.T.astype(np.float64), x))),
        g.astype(np.float64).sum(0),
    ]
    tensors = [torch.from_numpy(a).requires_grad_() for a in (x, w, b)]
    products = tuple(compress(INT8_PRODUCTS, flags))
    layer = Int8Linear(products, select_int8_kernel(CPU))
    out = layer(tensors[0].view(*rows, inputs), *tensors[1:])
    out.backward(torch.from_numpy(g).view_as(out))
    assert out.shape == (*rows, outputs)
    found = [out.detach().view(count, outputs), *(tensor.grad for tensor in tensors)]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours.numpy() - theirs).max() <= 2e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("kernel", sorted({select_int8_kernel(CPU), "float32"}))
def test_under_autocast_values_are_rounded_to_its_dtype_and_sums_are_not(kernel):
    x, w, g = (torch.from_numpy(draw(*size)) for size in ((40, 16), (24, 16), (40, 24)))
    x.requires_grad_(), w.requires_grad_()
    layer = Int8Linear(INT8_PRODUCTS, kernel)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, w, None)
    assert out.dtype == torch.bfloat16
    rounded, gradient = (t.detach().bfloat16().float().numpy() for t in (x, g))
    expected = multiply_coded(rounded, w.detach().numpy().T)
    assert torch.equal(out.double(), torch.from_numpy(expected).float().bfloat16().double())
    out.backward(g.bfloat16())
    expected = multiply_coded(gradient.T, rounded)
    assert w.grad.dtype == torch.float32, "the sum is not rounded to bfloat16"
    assert np.abs(w.grad.numpy() - expected).max() <= 2e-6 * np.abs(expected).max()


MODELS = {
    "gelu": {},
    "swiglu": {"mlp": "swiglu"},
    "shared": {"kv_sharing": "adjacent:2", "n_kv_head": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_layers_but_the_head_multiply_in_int8(name, monkeypatch):
    shape = {"vocab_size": 99, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(ModelConfig(**shape, **MODELS[name]))
    called = []
    kernel = INT8_KERNELS["integer"]
    monkeypatch.setitem(INT8_KERNELS, "integer", lambda a, b: called.append(1) or kernel(a, b))
    tokens = torch.randint(99, (2, 16))
    with model.multiply_by(Int8Linear(INT8_PRODUCTS, "integer")):
        model(tokens).sum().backward()
    layers = model.linear_layers()
    assert len(called) == 3 * len(layers)
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks.")}
    assert {f"{layer}.weight" for layer in layers} == matrices
    assert all(p.grad is not None for p in model.parameters())
    called.clear()
    model(tokens)
    assert not called, "outside of the block it is a float model"
