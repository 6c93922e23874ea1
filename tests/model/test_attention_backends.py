"""All attention backends agree, forward and gradient; a window costs less than the square."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kvlab.model import GPT, attention_backends
from kvlab.model.attention_backends import (
    BACKENDS,
    attend_flex,
    attend_sdpa,
    scaled_dot_product,
    select_backend,
)
from kvlab.model.causal_mask import CausalMask
from kvlab.model.kernels.cpu_kernel import use_plain_code
from kvlab.spec.model_config import ModelConfig
from tests.contracts.attention_backend_contract import (
    WHOLE_PASS,
    WITH_PAST,
    AttentionBackendContract,
)
from tests.contracts.cpu_kernel_contract import kernels_on


class TestSDPA(AttentionBackendContract):
    backend = "sdpa"


class TestWindowedBlocks(AttentionBackendContract):
    backend = "windowed_blocks"
    whole_pass = tuple(shape for shape in WHOLE_PASS if shape[1])
    with_past = tuple(shape for shape in WITH_PAST if shape[2])


class TestCPUTiled(AttentionBackendContract):
    backend = "cpu_tiled"
    with_past = ()


class TestFlex(AttentionBackendContract):
    """On CPU: forward alone."""

    backend = "flex"
    whole_pass = ((256, 40), (128, None))
    with_past = ((128, 256, 40),)
    dtype, tolerance, has_gradient = torch.float32, 1e-5, False


def test_every_backend_has_its_suite():
    assert {suite.backend for suite in AttentionBackendContract.__subclasses__()} == set(BACKENDS)


@pytest.mark.parametrize("window", [None, 40])
def test_cpu_tiled_computes_bfloat16_in_float32_also_under_autocast(window):
    torch.manual_seed(0)
    ours = [torch.randn(2, h, 300, 16).bfloat16().requires_grad_() for h in (4, 2, 2)]
    theirs = [t.detach().float().requires_grad_() for t in ours]
    with torch.autocast("cpu", torch.bfloat16):
        out = BACKENDS["cpu_tiled"].attend(*ours, CausalMask(window))
    expected = BACKENDS["cpu_tiled"].attend(*theirs, CausalMask(window))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    out.sum().backward()
    expected.sum().backward()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left.grad, right.grad.bfloat16())


def hybrid_model():
    """Multi-query and hybrid, with two rows as long as its context."""
    config = ModelConfig(
        n_layer=2, n_head=4, n_kv_head=1, n_embd=64, block_size=256, vocab_size=100,
        position="rope", attention_pattern="GL", window=40,
    )  # fmt: skip
    return GPT(config), torch.randint(0, 100, (2, 256), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("error:Dynamo detected")  # a cache in the graph, which is none
@pytest.mark.parametrize(
    ("document_start", "precision"), [(None, torch.bfloat16), (3, torch.float32)]
)
def test_a_compiled_model_takes_flex_into_one_graph(monkeypatch, precision, document_start):
    model, text = hybrid_model()
    reduced = torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16)
    with torch.no_grad(), reduced:
        expected = model.hidden_states(text, document_start=document_start)

        def as_on_cuda(_q, k, _v, mask, _sink):
            is_plain = mask.documents is None and not mask.is_windowed(k.shape[2])
            return "sdpa" if is_plain else "flex"

        monkeypatch.setattr("kvlab.model.attention.select_backend", as_on_cuda)
        torch.compiler.reset()
        compiled = torch.compile(model.hidden_states, fullgraph=True, backend="eager")
        actual = compiled(text, document_start=document_start)
    assert (actual - expected).abs().max() < (2e-5 if precision == torch.float32 else 0.02)


def test_heads_are_repeated_where_cuda_has_no_fused_kernel_of_groups(monkeypatch):
    """And that changes nothing but the kernel."""
    for *sizes, has_mask, repeated in (
        ("cuda", torch.float32, 12, 12, False, False),
        ("cuda", torch.float32, 12, 1, False, True),
        ("cuda", torch.float32, 12, 4, True, True),
        ("cuda", torch.bfloat16, 12, 1, False, False),
        ("cuda", torch.float16, 12, 1, True, True),
        ("cpu", torch.float32, 12, 1, True, False),
    ):
        assert attention_backends.repeats_kv_heads(*sizes, has_mask=has_mask) == repeated
    monkeypatch.setattr(attention_backends, "repeats_kv_heads", lambda *_, **_mask: True)
    q, k, v = (torch.randn(2, heads, 30, 8, dtype=torch.float64) for heads in (4, 2, 2))
    repeated = scaled_dot_product(q, k, v, is_causal=True)
    monkeypatch.undo()
    assert (repeated - scaled_dot_product(q, k, v, is_causal=True)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_for_cuda_begin_where_its_kernels_load(dtype):
    """Whatever their tensor is a part of, and without a copy where they do."""
    whole = torch.randn(2, 3, 10, 24, dtype=dtype)
    for part, is_copied in (
        (whole, False),
        (whole.transpose(1, 2), False),
        (whole[..., 8:16], False),
        (whole[..., 1:9], True),
        (whole[..., :6].contiguous(), True),
        (whole.flatten(2)[..., :230].unflatten(2, (10, 23)), True),
    ):
        aligned = attention_backends.align_vectors(part)
        assert torch.equal(aligned, part)
        assert (aligned is not part) == is_copied


class SaysCuda(torch.Tensor):
    device = torch.device("cuda")


@pytest.mark.parametrize("has_mask", [False, True])
def test_what_torchs_attention_gets_on_cuda(monkeypatch, has_mask):
    """Aligned vectors, and with a mask no kernel that is planned for each shape."""
    noted, attention = [], F.scaled_dot_product_attention

    def note(q, k, v, **options):
        noted.append([torch.backends.cuda.cudnn_sdp_enabled(), *(t.stride() for t in (q, k, v))])
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    x = torch.randn(1, 2, 5, 9)[..., :8].as_subclass(SaysCuda)
    scaled_dot_product(x, x, x, torch.ones(5, 5, dtype=torch.bool) if has_mask else None)
    assert noted == [[not has_mask, *[(80, 40, 8, 1)] * 3]]


def test_more_shapes_than_torch_compiles_by_itself_stay_compiled(monkeypatch):
    """The ninth is compiled, too. Beyond our own limit all of them are compiled anew."""
    is_compiled, mask = [], CausalMask(16)

    def kernel(q, k, v, **_options):
        is_compiled.append(torch.compiler.is_compiling())
        return attend_sdpa(q, k, v, mask)

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compile(f, backend="eager", **o))
    monkeypatch.setattr(attention_backends.flex, "flex_attention", kernel)
    monkeypatch.setattr(attention_backends, "FLEX_SHAPES", 10)
    attention_backends._compile_flex.cache_clear()
    torch.compiler.reset()
    for length in range(32, 44):
        x = torch.randn(1, 1, length, 8)
        expected = attend_sdpa(x, x, x, mask)
        assert (attend_flex(x, x, x, mask, compiles=True) - expected).abs().max() < 1e-6
    assert is_compiled == [True] * 12, "none is run without being compiled"
    attention_backends._compile_flex.cache_clear()


def select(queries, keys, window, head_dim=16, device="cpu", **options):
    """The backend for tensors of these shapes; on CUDA nothing but the shape is looked at."""
    q, k = ((1, 2, count, head_dim) for count in (queries, keys))
    if device == "cuda":
        facts = {"device": torch.device(device), "requires_grad": True, **options}
        q, k = (SimpleNamespace(shape=shape, **facts) for shape in (q, k))
    else:
        q, k = (torch.zeros(shape, **options) for shape in (q, k))
    return select_backend(q, k, k, CausalMask(window))


def test_backends_are_selected_by_device_and_shape():
    assert select(64, 64, None) == "sdpa"
    assert select(64, 64, 64) == "sdpa"
    assert select(64, 64, 8) == "windowed_blocks"
    assert select(64, 64, 8, device="cuda") == "flex"
    assert select(64, 64, 8, head_dim=12, device="cuda") == "windowed_blocks", "it needs 16"
    assert select(8, 64, 8, device="cuda") == "windowed_blocks"
    # without a gradient no kernel is compiled for a length
    assert select(64, 64, 8, device="cuda", requires_grad=False) == "windowed_blocks"
    assert select(64, 64, None, device="cuda", requires_grad=False) == "sdpa"
    with torch.no_grad():
        assert select(64, 64, 8, device="cuda") == "windowed_blocks"


@kernels_on
def test_training_on_cpu_selects_tiles_where_they_are_faster():
    training = {"requires_grad": True}
    for window in (None, 8):
        assert select(512, 512, window, 64, **training) == "cpu_tiled"
        assert select(512, 512, window, 64) != "cpu_tiled", "no backward pass to save for"
        assert select(512, 512, window, 16, **training) == "cpu_tiled"
        assert select(512, 512, window, 8, **training) != "cpu_tiled"
        length = 2048 if window else 512  # a window bounds what is saved of long texts
        reduced = select(length, length, window, 64, dtype=torch.bfloat16, **training)
        assert (reduced == "cpu_tiled") != torch.cpu._is_amx_tile_supported()
    assert select(2048, 2048, None, 64, dtype=torch.bfloat16, **training) == "sdpa"
    assert select(8192, 8192, None, 64, **training) == "sdpa", "too much to save"
    assert select(8192, 8192, 256, 64, **training) == "cpu_tiled"
    for shape in ((1, 2, 64, 8), (1, 2, 8192, 8)):  # with a sink no other backend saves less
        q = torch.zeros(shape, requires_grad=True)
        assert select_backend(q, q, q, CausalMask()) == "sdpa"
        assert select_backend(q, q, q, CausalMask(), torch.zeros(2)) == "cpu_tiled"
    with use_plain_code():
        assert select(512, 512, None, 64, requires_grad=True) == "sdpa"
        assert select(512, 512, 8, 64, requires_grad=True) == "windowed_blocks"


@kernels_on
@pytest.mark.parametrize("has_mask", [False, True])
def test_without_a_gradient_a_sink_holds_few_scores_at_a_time(monkeypatch, has_mask):
    q, sink = torch.randn(2, 4, 33, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 33, 8, dtype=torch.float64)
    mask = (torch.rand(2, 1, 33, 33) < 0.5) | torch.eye(33, dtype=torch.bool) if has_mask else None
    options = {"is_causal": not has_mask, "sink": sink}
    with_gradient = scaled_dot_product(q.requires_grad_(), k, v, mask, **options)
    monkeypatch.setattr(attention_backends, "SINK_SCORES", 2 * 4 * 33 * 5)
    sizes = []
    softmax = attention_backends.softmax_with_sink
    monkeypatch.setattr(attention_backends, "softmax_with_sink",
                        lambda scores, s: sizes.append(scores.numel()) or softmax(scores, s))  # fmt: skip
    with torch.no_grad():
        few = scaled_dot_product(q, k, v, mask, **options)
    assert len(sizes) == 7
    assert max(sizes) == 2 * 4 * 33 * 5
    assert (few - with_gradient).abs().max() < 1e-12
