"""Triton's kernels against float64: on a CUDA device, or on CPU by Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest -m gpu tests/model/kernels/test_triton_kernels.py
"""

import importlib.util
import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.cache.formats import ScaledCodes, get_format
from kvlab.model import GPT, attention_backends, decode_attention, generate, loss
from kvlab.model.generate import EagerDecoder, StaticDecoder, prefill
from kvlab.model.kernels import triton_kernels, use_plain_code
from kvlab.model.kernels.cpu_kernel import is_plain_code_used
from kvlab.spec import ModelConfig, ServingConfig

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The interpreter (Triton 3.9) multiplies the bits of bfloat16 as integers."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
needs_device = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(),
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)


def stored(name, *shape):
    """Random values as a cache stores them, of which only the first entries are in use."""
    if name not in ("int8", "fp8"):
        return torch.randn(*shape, device=DEVICE).to(getattr(torch, name))[:, :, :-3]
    encoded = get_format(name).encode(torch.randn(*shape, device=DEVICE))
    return ScaledCodes(*(part[:, :, :-3] for part in encoded))


@pytest.fixture
def kernels_on(monkeypatch):
    """The interpreter's CPU tensors, too, take the way of CUDA."""
    if IS_INTERPRETED:
        for module in (decode_attention, generate, loss):
            monkeypatch.setattr(
                module, "are_kernels_usable", lambda _device: not is_plain_code_used()
            )
        monkeypatch.setattr(triton_kernels, "count_processors", lambda _device: 8)


def attend_by_definition(q, k, v, counts=None, sink=None):
    k, v = (part.decode() if isinstance(part, ScaledCodes) else part for part in (k, v))
    q, k, v = (t.double() for t in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if counts is not None:
        seen = torch.arange(k.shape[2], device=DEVICE) < counts[:, None]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = scores.softmax(-1) if sink is None else softmax_with_sink(scores, sink.double())
    return weights @ v


@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", ["int8", "fp8", "model"])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "width", "entries", "counts", "has_sink", "splits"),
    [
        (2, 2, 1, 16, 200, None, False, 1),
        (3, 2, 4, 24, 300, [1, 65, 297], False, 4),
        (2, 1, 3, 64, 150, [2, 147], True, 2),
        (1, 1, 20, 32, 67, None, True, 1),
        (1, 2, 18, 256, 40, None, True, 1),
        (1, 1, 17, 256, 40, None, False, 1),
    ],
)
def test_attention_to_what_a_cache_stores(
    name, dtype, batch, heads, group, width, entries, counts, has_sink, splits
):
    """Multi-head, grouped, more splits than some rows have entries, more than 16 queries, and more
    than a program attends for."""
    torch.manual_seed(0)
    q = torch.randn(batch, heads, group, width, device=DEVICE).to(dtype)
    name = str(dtype).removeprefix("torch.") if name == "model" else name
    k, v = (stored(name, batch, heads, entries + 3, width) for _ in range(2))
    counts = None if counts is None else torch.tensor(counts, device=DEVICE)
    sink = torch.randn(heads, group, device=DEVICE) * 3 if has_sink else None
    actual = triton_kernels.attend_stored(q, k, v, counts, sink, splits)
    assert actual.dtype == dtype
    error = (actual.double() - attend_by_definition(q, k, v, counts, sink)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@needs_device
def test_entries_that_are_not_in_use_are_not_read():
    """NaN codes of float8 would show."""
    torch.manual_seed(0)
    q = torch.randn(2, 1, 2, 16, device=DEVICE)
    k, v = (stored("fp8", 2, 1, 203, 16) for _ in range(2))
    counts = torch.tensor([5, 130], device=DEVICE)
    expected = attend_by_definition(q, k, v, counts)
    for part in (k, v):
        for row, count in enumerate(counts.tolist()):
            part.codes.view(torch.uint8)[row, :, count:] = 0x7F
            part.scales[row, :, count:] = torch.nan
    actual = triton_kernels.attend_stored(q, k, v, counts, splits=3)
    assert (actual - expected).abs().max() < 1e-5


def test_the_splits_occupy_the_processors_and_no_more():
    assert triton_kernels.choose_splits(pairs=12, entries=1024, processors=132) == 8
    assert triton_kernels.choose_splits(pairs=1, entries=65536, processors=132) == 512
    assert triton_kernels.choose_splits(pairs=4096, entries=65536, processors=132) == 1
    assert triton_kernels.choose_splits(pairs=1, entries=3, processors=132) == 1


@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [50, 4096, 9000])
def test_cross_entropy_and_its_gradient(dtype, words):
    """Also of a target that is nearly impossible, and of columns that are whole blocks of -inf."""
    torch.manual_seed(0)
    logits = (torch.randn(5, words + 6, device=DEVICE) * 4).to(dtype)[:, :words]
    logits[1, 7] -= 300.0
    logits[2, 10:] = -torch.inf
    targets = torch.tensor([0, 7, 3, words - 1, 11], device=DEVICE)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses = triton_kernels.cross_entropy_in_place(logits, targets)
    assert (losses - expected).abs().max() < 1e-4
    assert expected.max() > 250
    assert (logits.double() - gradient).abs().max() < (1e-6 if dtype == torch.float32 else 5e-3)


@needs_device
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", [12, 64])
def test_a_token_is_stored_bit_for_bit_as_its_format_encodes_it(name, dtype, width):
    """Large and small numbers, zeros, ties between codes, and no entry but its own."""
    torch.manual_seed(0)
    batch, heads, size, kv_format = 7, 3, 5, get_format(name)
    values = torch.randn(batch, heads, 1, width, device=DEVICE)
    values *= torch.tensor([1.0, 1e-3, 1e-9, 0.0, 3e4, 1.0, 1.0], device=DEVICE).view(-1, 1, 1, 1)
    values[5] = torch.arange(width, device=DEVICE) / 2 + 127 - width / 2  # scale 1, then halves
    values[5, ..., -1] = 448.0 if name == "fp8" else 127.0
    values[6] = 448 * 2.0 ** -torch.arange(width, device=DEVICE).clamp(max=24)  # subnormal codes
    values = values.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)  # as the model has them
    stored = kv_format.allocate((batch, heads, size, width), values.device)
    for part in stored:
        part.view(torch.uint8).fill_(17)
    expected = [part.clone() for part in stored]
    entries = torch.tensor([0, 4, 2, 1, 3, 0, 4], device=DEVICE)
    for part, encoded in zip(expected, kv_format.encode(values), strict=True):
        part[torch.arange(batch, device=DEVICE), :, entries] = encoded[:, :, 0]
    triton_kernels.store_codes(values, ScaledCodes(*stored), entries)
    for part, right in zip(stored, expected, strict=True):
        assert torch.equal(part.view(torch.uint8), right.view(torch.uint8))


@needs_device
@pytest.mark.parametrize("name", ["int8", "fp8", "model"])
def test_a_models_step_is_that_of_plain_code(name, kernels_on, monkeypatch):  # noqa: ARG001
    """Groups, a ring, sinks, rows of different lengths, eager, static and compiled, where the
    kernel is one node of a graph for each layer."""
    nodes = []

    def backend(graph, _inputs):
        nodes.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.compiler.reset()
    run_step = torch.compile(generate._run_step, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(generate, "_compile_step", lambda: run_step)
    compiled = partial(StaticDecoder, compiles=True)
    config = ModelConfig(vocab_size=29, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=200,
                         position="rope", attention_pattern="GL", window=70,
                         sink="learned", sink_tokens=2)  # fmt: skip
    model = GPT(config, device=DEVICE).eval()
    text, logits = torch.arange(300, device=DEVICE).view(2, 150) % 29, {}
    for is_plain in (True, False):
        for lengths, decoder in (
            ([150, 3], StaticDecoder), (None, EagerDecoder), ([150, 3], compiled),
        ):  # fmt: skip
            cache = model.new_cache(2, 160, ServingConfig(kv_dtype=name))
            with torch.inference_mode(), use_plain_code() if is_plain else nullcontext():
                prefill(model, text, cache, lengths)
                step = decoder(model, cache)
                with attention_backends.record_kernels() as kernels:
                    steps = [step(torch.tensor([i, 5], device=DEVICE)).clone() for i in range(3)]
            assert ("triton_decode" in kernels) != is_plain or decoder is compiled
            logits.setdefault(decoder, []).append(torch.stack(steps))
    for plain, fused in logits.values():
        assert (plain - fused).abs().max() < 1e-4
    plain, fused = (sum("attend_stored" in node for node in one) for one in nodes)
    assert (plain, fused) == (0, config.n_layer)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_gpus_that_need_not_be_here(capability):
    """To machine code, by the assembler that comes with Triton."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {
        **dict.fromkeys(("k", "v"), "*i8"), **dict.fromkeys(("k_scales", "v_scales"), "*fp16"),
        **dict.fromkeys(("partial", "stats", "sink", "losses"), "*fp32"),
        **dict.fromkeys(("q", "out", "logits"), "*bf16"),
        **dict.fromkeys(("counts", "targets"), "*i64"), "softmax_scale": "fp32",
    }  # fmt: skip
    sizes = {"GROUP": 4, "V_WIDTH": 64, "V_BLOCK": 64}
    attend = {**sizes, "ROWS": 16, "WIDTH": 64, "WIDTH_BLOCK": 64, "BLOCK": 64}
    for kernel, constants, changed in (
        (triton_kernels._attend_chunk, {**attend, "IS_FLOAT8": True, "IS_EXACT": False}, {}),
        (triton_kernels._attend_chunk, {**attend, "IS_FLOAT8": False, "IS_EXACT": True},
         {"q": "*fp32"}),
        (triton_kernels._attend_chunk,
         {**attend, "IS_FLOAT8": False, "IS_EXACT": False, "k_scales": None, "v_scales": None},
         {"k": "*bf16", "v": "*bf16"}),
        (triton_kernels._join_chunks, {**sizes, "SPLITS_BLOCK": 64}, {}),
        # numbers that are 1 become constants
        (triton_kernels._attend_chunk,
         {**attend, "IS_FLOAT8": True, "IS_EXACT": False, "heads": 1, "ks_entry": 1, "vs_entry": 1,
          "entries": 1, "counts": None}, {}),
        (triton_kernels._join_chunks,
         {**sizes, "SPLITS_BLOCK": 1, "splits": 1, "heads": 1, "stats_size": 1, "sink": None}, {}),
        (triton_kernels._cross_entropy_row, {"BLOCK": 4096}, {}),
        *((triton_kernels._store_row,
           {"WIDTH": 64, "WIDTH_BLOCK": 64, "IS_FLOAT8": is_float8, "MAX_CODE": 127.0,
            "MIN_SCALE": 2.0**-24, "MAX_SCALE": 65504.0},
           {"values": "*bf16", "codes": "*i8", "scales": "*fp16", "entries": "*i64"})
          for is_float8 in (False, True)),
    ):  # fmt: skip
        signature = {
            name: "constexpr" if name in constants else {**types, **changed}.get(name, "i32")
            for name in kernel.arg_names
        }
        source = ASTSource(kernel, signature, constants)
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("stored", ["*fp32", "*bf16", "*i8"])
@pytest.mark.parametrize(("width", "group"), [(64, 4), (256, 4), (64, 128), (128, 64), (256, 32)])
def test_wide_heads_fit_the_shared_memory_of_small_gpus(width, group, stored):
    """99 KiB of a processor, by NVIDIA's table of compute capabilities; it fails at the launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, size = triton_kernels._attend_chunk, {"*fp32": 4, "*bf16": 2, "*i8": 1}[stored]
    is_exact = stored != "*bf16"
    group = min(group, triton_kernels.count_queries(width * (4 if is_exact else 2)))
    constants = {
        "GROUP": group, "ROWS": max(16, group), "WIDTH": width, "WIDTH_BLOCK": width, "V_WIDTH": width,
        "V_BLOCK": width, "BLOCK": triton_kernels.choose_block(2 * width * size),
        "IS_FLOAT8": False, "IS_EXACT": is_exact, "counts": None,
        **({} if size == 1 else {"k_scales": None, "v_scales": None}),
    }  # fmt: skip
    types = {
        "q": "*fp32" if is_exact else "*bf16", "k": stored, "v": stored, "k_scales": "*fp16",
        "v_scales": "*fp16", "partial": "*fp32", "stats": "*fp32", "softmax_scale": "fp32",
    }  # fmt: skip
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    compiled = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 89, 32))
    assert compiled.metadata.shared <= 99 * 2**10


@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_summed_loss_is_that_of_plain_code(dtype, kernels_on, monkeypatch):  # noqa: ARG001
    """Under autocast logits and their gradients are bfloat16, and the sum over chunks is not."""
    monkeypatch.setitem(loss.LOSS_CHUNK_TOKENS, DEVICE, 16)
    torch.manual_seed(0)
    hidden = torch.randn(40, 8, device=DEVICE, requires_grad=True)
    weight = torch.randn(300, 8, device=DEVICE, requires_grad=True)
    targets = torch.randint(300, (40,), device=DEVICE)
    results = []
    for is_plain in (True, False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
            with use_plain_code() if is_plain else nullcontext():
                value = loss.summed_loss(hidden, weight, targets)
            results.append([value, *torch.autograd.grad(value, [hidden, weight])])
    for plain, fused in zip(*results, strict=True):
        assert fused.dtype == torch.float32
        error = (plain - fused).norm() / plain.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
