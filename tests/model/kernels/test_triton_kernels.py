"""Triton's kernels against float64: on a CUDA device, or on CPU by Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest -m gpu tests/model/kernels/test_triton_kernels.py
"""

import importlib.util
import os
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.cache.formats import ScaledCodes, get_format
from kvlab.model import GPT, attention_backends, decode_attention, generate, loss
from kvlab.model.generate import EagerDecoder, StaticDecoder, prefill
from kvlab.model.kernels import triton_cross_entropy, triton_kernels
from kvlab.model.kernels.cpu_kernel import is_plain_code_used, use_plain_code
from kvlab.model.rope import RopeTable, apply_rope, make_rope_table
from kvlab.spec import ModelConfig, ServingConfig

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The interpreter (Triton 3.9) multiplies the bits of bfloat16 as integers."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")]
needs_device = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(),
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)


def stored(name, *shape, group=None):
    """Random values as a cache stores them, of which only the first entries are in use."""
    if name not in ("int8", "fp8", "int4"):
        return torch.randn(*shape, device=DEVICE).to(getattr(torch, name))[:, :, :-3]
    encoded = get_format(name, group).encode(torch.randn(*shape, device=DEVICE))
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


def decoded(part):
    return part.decode(torch.float64) if isinstance(part, ScaledCodes) else part.double()


def attend_by_definition(q, k, v, counts=None, sink=None):
    q, k, v = q.double(), decoded(k), decoded(v)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if counts is not None:
        seen = torch.arange(k.shape[2], device=DEVICE) < counts[:, None]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = scores.softmax(-1) if sink is None else softmax_with_sink(scores, sink.double())
    return weights @ v


def check_attention(actual, q, k, v, counts=None, sink=None):
    assert actual.dtype == q.dtype
    error = (actual.double() - attend_by_definition(q, k, v, counts, sink)).abs().max()
    assert error < (1e-5 if q.dtype == torch.float32 else 2e-2)


def dtype_name(name, dtype):
    return str(dtype).removeprefix("torch.") if name == "model" else name


SHAPES = [
    # batch, heads, group, width, entries, counts, has_sink, splits
    (2, 2, 1, 16, 200, None, False, 1),
    (3, 2, 4, 24, 300, [1, 65, 297], False, 4),
    (2, 1, 3, 64, 150, [2, 147], True, 2),
    (1, 1, 20, 32, 67, None, True, 1),
    (1, 2, 18, 256, 40, None, True, 1),
    (1, 1, 17, 256, 40, None, False, 1),
]
"""Multi-head, grouped, more splits than some rows have entries, more than 16 queries, and more than
a program attends for."""


@needs_device
@pytest.mark.parametrize("name", ["int8", "fp8", "model"])
@pytest.mark.parametrize(
    ("dtype", "shape"), [*((torch.float32, shape) for shape in SHAPES), (HALF, SHAPES[1])]
)
def test_attention_to_what_a_cache_stores(name, dtype, shape):
    torch.manual_seed(0)
    batch, heads, group, width, entries, counts, has_sink, splits = shape
    q = torch.randn(batch, heads, group, width, device=DEVICE).to(dtype)
    name = dtype_name(name, dtype)
    k, v = (stored(name, batch, heads, entries + 3, width) for _ in range(2))
    counts = None if counts is None else torch.tensor(counts, device=DEVICE)
    sink = torch.randn(heads, group, device=DEVICE) * 3 if has_sink else None
    check_attention(
        triton_kernels.attend_stored(q, k, v, counts, sink, splits), q, k, v, counts, sink
    )


NAMES = pytest.mark.parametrize(
    ("name", "group"), [("int8", None), ("fp8", 8), ("int4", 8), ("model", None)]
)


@needs_device
@NAMES
@pytest.mark.parametrize(
    ("dtype", "rows_differ", "width", "rotary_dim"),
    [(torch.float32, True, 40, 16), (torch.float32, False, 24, 24), (HALF, False, 40, 16)],
)
def test_keys_that_are_rotated_as_they_are_read(name, group, dtype, rows_differ, width, rotary_dim):
    """Some of their numbers or all, by angles of a row or of all rows; one tensor is K and V."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, 3, width, device=DEVICE).to(dtype)
    kv = stored(dtype_name(name, dtype), 2, 2, 153, width, group=group)
    positions = torch.randint(500, (2, 150) if rows_differ else (150,), device=DEVICE)
    table = make_rope_table(positions, rotary_dim, 100.0, dtype)
    counts = torch.tensor([150, 67], device=DEVICE)
    actual = triton_kernels.attend_stored(q, kv, kv, counts, splits=2, table=table)
    keys = apply_rope(decoded(kv), RopeTable(*(part.double() for part in table)))
    check_attention(actual, q, keys, kv, counts)


@needs_device
@NAMES
@pytest.mark.parametrize(("dtype", "heads", "queries"), [(torch.float32, 2, 5), (HALF, 1, 40)])
def test_keys_of_which_all_heads_share_some_numbers(name, group, dtype, heads, queries):
    """The first 24 of 48 stored numbers are of keys, beside 16 that are shared."""
    torch.manual_seed(0)
    q = torch.randn(2, heads, queries, 16 + 24, device=DEVICE).to(dtype)
    name = dtype_name(name, dtype)
    kv, shared = (stored(name, 2, *shape, group=group) for shape in ((heads, 83, 48), (1, 83, 16)))
    sink = torch.randn(heads, queries, device=DEVICE) * 3
    actual = triton_kernels.attend_stored(q, kv, kv, None, sink, splits=2, shared=shared)
    keys = torch.cat([decoded(shared).expand(-1, heads, -1, -1), decoded(kv)[..., :24]], -1)
    check_attention(actual, q, keys, kv, None, sink)


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
@pytest.mark.parametrize(
    ("dtype", "words"), [(torch.float32, 4096), (torch.float32, 50), (torch.bfloat16, 9000)]
)
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
    losses = triton_cross_entropy.cross_entropy_in_place(logits, targets)
    assert (losses - expected).abs().max() < 1e-4
    assert expected.max() > 250
    assert (logits.double() - gradient).abs().max() < (1e-6 if dtype == torch.float32 else 5e-3)


@needs_device
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("width", "group"), [(12, None), (64, None), (24, 8)])
def test_a_token_is_stored_bit_for_bit_as_its_format_encodes_it(name, dtype, width, group):
    """Large and small numbers, zeros, ties between codes, and no entry but its own."""
    torch.manual_seed(0)
    batch, heads, size, kv_format = 7, 3, 5, get_format(name, group)
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
@pytest.mark.parametrize(
    ("serving", "kv"),
    [
        ({"kv_dtype": "int8"}, "separate"),
        ({"kv_dtype": "model"}, "separate"),
        ({"kv_dtype": {"k": "int8", "v": "int4"}}, "separate"),
    ],
)
def test_a_models_step_is_that_of_plain_code(serving, kv, kernels_on, monkeypatch):  # noqa: ARG001
    check_step(serving, kv, monkeypatch)


def check_step(serving, kv, monkeypatch):
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
    heads = {} if isinstance(kv, dict) else {"n_kv_head": 2}
    config = ModelConfig(vocab_size=29, n_layer=2, n_head=4, n_embd=32, block_size=200, kv=kv,
                         position="rope", attention_pattern="GL", window=70,
                         sink="learned", sink_tokens=2, **heads)  # fmt: skip
    model = GPT(config, device=DEVICE).eval()
    text, logits = torch.arange(300, device=DEVICE).view(2, 150) % 29, {}
    for is_plain in (True, False):
        for lengths, decoder in (
            ([150, 3], StaticDecoder), (None, EagerDecoder), ([150, 3], compiled),
        ):  # fmt: skip
            cache = model.new_cache(2, 160, ServingConfig(**serving))
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


POINTERS = {
    **dict.fromkeys(("k", "v", "shared"), "*i8"),
    **dict.fromkeys(("k_scales", "v_scales", "shared_scales"), "*fp16"),
    **dict.fromkeys(("partial", "stats", "sink", "losses"), "*fp32"),
    **dict.fromkeys(("q", "out", "logits", "cos", "sin"), "*bf16"),
    **dict.fromkeys(("counts", "targets"), "*i64"), "softmax_scale": "fp32",
}  # fmt: skip

PLAIN = {
    "SHARED_WIDTH": 0, "SHARED_BLOCK": 16, "K_SCALE_GROUP": 0, "V_SCALE_GROUP": 0, "SHARED_SCALE_GROUP": 0,
    "K_HALF": 0, "V_HALF": 0, "SHARED_HALF": 0, "ROTARY_DIM": 0, "IS_FLOAT8": False,
    "IS_EXACT": False, "cos": None, "sin": None, "shared": None, "shared_scales": None,
}  # fmt: skip
"""`_attend_chunk` for values or codes with one scale, neither rotated nor joined."""


def compile_kernel(kernel, capability, arguments, **options):
    """Compile to machine code, by the assembler that comes with Triton.

    Args:
        arguments: constants by name, or types of pointers other than in `POINTERS`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {k: v for k, v in arguments.items() if isinstance(v, str)}
    constants = {k: v for k, v in arguments.items() if k not in types}
    signature = {
        name: "constexpr" if name in constants else {**POINTERS, **types}.get(name, "i32")
        for name in kernel.arg_names
    }
    # pointers and strides of values are multiples of 16 as they are at a launch: only so loads are
    # pipelined, and their tiles in shared memory
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
        or re.fullmatch("(k|v|shared|codes)_(row|head|entry)", name)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.cuda_code
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_they_compile_for_gpus_that_need_not_be_here():
    """For compute capabilities 8.0 and 9.0; more forms of the first kernel for 8.9 below."""
    sizes = {"GROUP": 4, "V_WIDTH": 64, "V_BLOCK": 64}
    attend = {**PLAIN, **sizes, "ROWS": 16, "WIDTH": 64, "WIDTH_BLOCK": 64, "BLOCK": 64}
    numbers = {"MAX_CODE": 127.0, "MIN_SCALE": 2.0**-24, "MAX_SCALE": 65504.0}
    token = {"values": "*bf16", "codes": "*i8", "scales": "*fp16", "entries": "*i64"}
    chunk, join = triton_kernels._attend_chunk, triton_kernels._join_chunks
    ones = {"heads": 1, "splits": 1, "entries": 1}  # numbers that are 1 become constants
    forms = (
        (chunk, {**attend, "IS_FLOAT8": True, "K_SCALE_GROUP": 16, "V_SCALE_GROUP": 16}),
        (chunk, {**attend, "IS_FLOAT8": True, **ones, "ks_entry": 1, "vs_entry": 1, "counts": None}),
        (join, {**sizes, "SPLITS_BLOCK": 64}),
        (join, {**sizes, "SPLITS_BLOCK": 1, **ones, "stats_size": 1, "sink": None}),
        (triton_cross_entropy._cross_entropy_row, {"BLOCK": 4096}),
        *((triton_kernels._store_row,
           {"WIDTH": 64, "WIDTH_BLOCK": 64, "IS_FLOAT8": is_float8, **numbers, **token})
          for is_float8 in (False, True)),
    )  # fmt: skip
    for capability in (80, 90):
        for kernel, arguments in forms:
            known = {k: v for k, v in arguments.items() if k in kernel.arg_names}
            assert compile_kernel(kernel, capability, known).asm["cubin"]


@pytest.mark.cuda_code
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("stored", "is_exact"), [("*fp32", True), ("*bf16", False), ("*i8", True), ("*i8", False)]
)
@pytest.mark.parametrize(
    ("form", "width", "group"),
    [
        *(("plain", *sizes) for sizes in ((64, 128), (256, 32))),
        *((form, 256, 32) for form in ("rotated", "joined", "packed")),
    ],
)
def test_wide_heads_fit_the_shared_memory_of_small_gpus(width, group, form, stored, is_exact):
    """99 KiB of a processor, by NVIDIA's table of compute capabilities; it fails at the launch."""
    if form == "packed" and stored != "*i8":
        pytest.skip("values are not packed")
    size = {"*fp32": 4, "*bf16": 2, "*i8": 1}[stored]
    q_size = 4 if is_exact else 2
    shared = 64 if form == "joined" else 0
    width_block = max(16, triton_kernels.triton.next_power_of_2(width))
    group = min(group, triton_kernels.count_queries((width_block + shared) * q_size))
    rows = max(16, triton_kernels.triton.next_power_of_2(group))
    widths = (width_block, width_block, *((shared,) if shared else ()))
    is_rotated = form == "rotated"
    tiles = triton_kernels.choose_tiles(widths, size, q_size, group, is_rotated=is_rotated)
    has_scales = {} if size == 1 else {"k_scales": None, "v_scales": None, "shared_scales": None}
    dense = "*fp32" if is_exact else "*bf16"
    forms = {
        "plain": {},
        "rotated": {"ROTARY_DIM": width, "cos": dense, "sin": dense},
        "joined": {"SHARED_WIDTH": 64, "SHARED_BLOCK": 64, "shared": stored,
                   "shared_scales": "*fp16"},
        "packed": {"K_SCALE_GROUP": 32, "V_SCALE_GROUP": 32, "K_HALF": width // 2, "V_HALF": width // 2},
    }  # fmt: skip
    arguments = {
        **PLAIN, "GROUP": group, "ROWS": rows, "WIDTH": width, "WIDTH_BLOCK": width_block,
        "V_WIDTH": width, "V_BLOCK": width_block, "IS_EXACT": is_exact, "counts": None,
        "BLOCK": tiles[0], "q": dense, "k": stored, "v": stored, **forms[form], **has_scales,
    }  # fmt: skip
    kernel, stages = triton_kernels._attend_chunk, tiles[1]
    compiled = compile_kernel(kernel, 89, arguments, num_stages=stages)
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
