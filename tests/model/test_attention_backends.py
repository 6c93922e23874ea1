"""All attention backends agree, forward and gradient; a window costs less than the square."""

from types import SimpleNamespace

import pytest
import torch

from kvlab.model import GPT
from kvlab.model.attention_backends import BACKENDS, Backend, select_backend
from kvlab.model.kernels import use_plain_code
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


def test_a_backend_is_added_by_one_entry(monkeypatch):
    """It comes first in the table, claims all queries, and the model attends through it."""
    calls = []

    def attend(q, k, v, window, documents):
        calls.append(window)
        return BACKENDS["sdpa"].attend(q, k, v, window, documents)

    added = {"toy": Backend(attend, lambda *_: True), **BACKENDS}
    model, text = hybrid_model()
    with torch.no_grad():
        expected = model(text)
        for module in ("kvlab.model.attention", "kvlab.model.attention_backends"):
            monkeypatch.setattr(f"{module}.BACKENDS", added)
        assert (model(text) - expected).abs().max() < 1e-5
    assert calls == [None, 40, 40]


@pytest.mark.parametrize("window", [None, 40])
def test_cpu_tiled_computes_bfloat16_in_float32_also_under_autocast(window):
    torch.manual_seed(0)
    ours = [torch.randn(2, h, 300, 16).bfloat16().requires_grad_() for h in (4, 2, 2)]
    theirs = [t.detach().float().requires_grad_() for t in ours]
    with torch.autocast("cpu", torch.bfloat16):
        out = BACKENDS["cpu_tiled"].attend(*ours, window)
    expected = BACKENDS["cpu_tiled"].attend(*theirs, window)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    out.sum().backward()
    expected.sum().backward()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left.grad, right.grad.bfloat16())


def hybrid_model():
    """Multi-query and hybrid, with two rows as long as its context."""
    config = ModelConfig(
        n_layer=3, n_head=4, n_kv_head=1, n_embd=64, block_size=256, vocab_size=100,
        position="rope", attention_pattern="GLL", window=40,
    )  # fmt: skip
    return GPT(config), torch.randint(0, 100, (2, 256), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("error:Dynamo detected")  # a cache in the graph, which is none
@pytest.mark.parametrize("document_start", [None, 3])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_compiled_model_takes_flex_into_one_graph(monkeypatch, precision, document_start):
    model, text = hybrid_model()
    reduced = torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16)
    with torch.no_grad(), reduced:
        expected = model.hidden_states(text, document_start=document_start)

        def as_on_cuda(_q, k, _v, window, documents=None):
            keys = k.shape[2]
            return "flex" if documents is not None or (window or keys) < keys else "sdpa"

        monkeypatch.setattr("kvlab.model.attention.select_backend", as_on_cuda)
        torch.compiler.reset()
        compiled = torch.compile(model.hidden_states, fullgraph=True, backend="eager")
        actual = compiled(text, document_start=document_start)
    assert (actual - expected).abs().max() < (2e-5 if precision == torch.float32 else 0.02)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_compiled_model_trains_as_one_graph(precision):
    """The choice of a backend is made while it is traced, and leaves nothing in the graph."""
    model, text = hybrid_model()
    torch.compiler.reset()
    compiled = torch.compile(model.hidden_states, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        actual, expected = compiled(text), model.hidden_states(text)
    assert actual.requires_grad
    assert (actual - expected).abs().max() < (2e-5 if precision == torch.float32 else 0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_gradient_agrees_with_sdpa_on_cuda():
    torch.manual_seed(0)
    ours = [torch.randn(2, h, 512, 64, device="cuda", requires_grad=True) for h in (4, 2, 2)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out, expected = BACKENDS["flex"].attend(*ours, 100), BACKENDS["sdpa"].attend(*theirs, 100)
    out.square().sum().backward()
    expected.square().sum().backward()
    for left, right in zip([out, *(t.grad for t in ours)], [expected, *(t.grad for t in theirs)],
                           strict=True):  # fmt: skip
        assert (left - right).abs().max() < 2e-3


def select(queries, keys, window, head_dim=16, device="cpu", **options):
    """The backend for tensors of these shapes; on CUDA nothing but the shape is looked at."""
    q, k = ((1, 2, count, head_dim) for count in (queries, keys))
    if device == "cuda":
        q, k = (SimpleNamespace(shape=shape, device=torch.device(device)) for shape in (q, k))
    else:
        q, k = (torch.zeros(shape, **options) for shape in (q, k))
    return select_backend(q, k, k, window)


def test_backends_are_selected_by_device_and_shape():
    assert select(64, 64, None) == "sdpa"
    assert select(64, 64, 64) == "sdpa"
    assert select(64, 64, 8) == "windowed_blocks"
    assert select(64, 64, 8, device="cuda") == "flex"
    assert select(8, 64, 8, device="cuda") == "windowed_blocks"


@kernels_on
def test_training_on_cpu_selects_tiles_where_they_are_faster():
    training = {"requires_grad": True}
    for window in (None, 8):
        assert select(512, 512, window, 64, **training) == "cpu_tiled"
        assert select(512, 512, window, 64) != "cpu_tiled", "no backward pass to save for"
        assert select(512, 512, window, 16, **training) == "cpu_tiled"
        assert select(512, 512, window, 8, **training) != "cpu_tiled"
        reduced = select(512, 512, window, 64, dtype=torch.bfloat16, **training)
        assert (reduced == "cpu_tiled") != torch.cpu._is_amx_tile_supported()
    assert select(2048, 2048, None, 64, dtype=torch.bfloat16, **training) == "sdpa"
    assert select(8192, 8192, None, 64, **training) == "sdpa", "too much to save"
    assert select(8192, 8192, 256, 64, **training) == "cpu_tiled"


def test_plain_code_selects_no_kernel():
    with use_plain_code():
        assert select(512, 512, None, 64, requires_grad=True) == "sdpa"
        assert select(512, 512, 8, 64, requires_grad=True) == "windowed_blocks"
