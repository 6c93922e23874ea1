"""All attention backends agree, forward and gradient; a window costs less than the square."""

import math
from types import SimpleNamespace

import pytest
import torch

from kvlab.model import GPT
from kvlab.model.attention_backends import BACKENDS, select_backend
from kvlab.spec.model_config import ModelConfig


def naive(q, k, v, window):
    past = k.shape[2] - q.shape[2]
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    far = window or k.shape[2]
    hidden = [[not 0 <= i + past - j < far for j in range(k.shape[2])] for i in range(q.shape[2])]
    return scores.masked_fill(torch.tensor(hidden), -torch.inf).softmax(-1) @ v


SHAPES = [
    # queries, keys, window
    (17, 17, None),
    (17, 17, 5),
    (5, 30, None),
    (5, 30, 7),
    (130, 130, 9),
    (140, 200, 70),
    (1, 40, 16),
]


CASES = [("sdpa", *shape) for shape in SHAPES] + [("blocked", *s) for s in SHAPES if s[2]]
CASES += [("kept", n, n, w) for n in (17, 300) for w in (None, 1, 5, 70, 130, 200, 299, 400)]


@pytest.mark.parametrize(("name", "queries", "keys", "window"), CASES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_forward_and_gradient_agree_with_the_definition(name, queries, keys, window, kv_heads):
    torch.manual_seed(0)
    shapes = [(2, 4, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)]
    ours = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    weight = torch.randn(shapes[0], dtype=torch.float64)
    out, wanted = BACKENDS[name](*ours, window), naive(*theirs, window)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert (out - wanted).abs().max() < 1e-12
    for left, right in zip(ours, theirs, strict=True):
        assert (left.grad - right.grad).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, 40])
def test_kept_computes_bfloat16_in_float32_also_under_autocast(window):
    torch.manual_seed(0)
    ours = [torch.randn(2, h, 300, 16).bfloat16().requires_grad_() for h in (4, 2, 2)]
    theirs = [t.detach().float().requires_grad_() for t in ours]
    with torch.autocast("cpu", torch.bfloat16):
        out = BACKENDS["kept"](*ours, window)
    wanted = BACKENDS["kept"](*theirs, window)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted.bfloat16())
    out.sum().backward()
    wanted.sum().backward()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left.grad, right.grad.bfloat16())


@pytest.mark.parametrize(("queries", "keys", "window"), [(256, 256, 40), (128, 256, 40)])
def test_flex_agrees_with_sdpa_forward(queries, keys, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((4, queries), (2, keys), (2, keys)))
    with torch.inference_mode():
        wanted = BACKENDS["sdpa"](q, k, v, window)
        assert (BACKENDS["flex"](q, k, v, window) - wanted).abs().max() < 1e-5


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
        wanted = model.hidden(text, document_start=document_start)

        def as_on_cuda(_q, keys, window, has_documents=False):
            return "flex" if has_documents or (window or keys) < keys else "sdpa"

        monkeypatch.setattr("kvlab.model.attention.select_backend", as_on_cuda)
        torch.compiler.reset()
        compiled = torch.compile(model.hidden, fullgraph=True, backend="eager")
        found = compiled(text, document_start=document_start)
    assert (found - wanted).abs().max() < (2e-5 if precision == torch.float32 else 0.02)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_compiled_model_trains_as_one_graph(precision):
    """The choice of a backend is made while it is traced, and leaves nothing in the graph."""
    model, text = hybrid_model()
    torch.compiler.reset()
    compiled = torch.compile(model.hidden, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found, wanted = compiled(text), model.hidden(text)
    assert found.requires_grad
    assert (found - wanted).abs().max() < (2e-5 if precision == torch.float32 else 0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_gradient_agrees_with_sdpa_on_cuda():
    torch.manual_seed(0)
    ours = [torch.randn(2, h, 512, 64, device="cuda", requires_grad=True) for h in (4, 2, 2)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out, wanted = BACKENDS["flex"](*ours, 100), BACKENDS["sdpa"](*theirs, 100)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for left, right in zip([out, *(t.grad for t in ours)], [wanted, *(t.grad for t in theirs)],
                           strict=True):  # fmt: skip
        assert (left - right).abs().max() < 2e-3


def test_the_table_picks_by_device_and_shape():
    def queries(count, dim=16, device="cpu", grad=False, dtype=None):
        shape = (1, 2, count, dim)
        if device == "cuda":  # the shape is asked, nothing is computed
            return SimpleNamespace(shape=shape, device=torch.device(device))
        return torch.zeros(shape, dtype=dtype, requires_grad=grad)

    assert select_backend(queries(64), 64, None) == "sdpa"
    assert select_backend(queries(64), 64, 64) == "sdpa"
    assert select_backend(queries(64), 64, 8) == "blocked"
    assert select_backend(queries(64, device="cuda"), 64, 8) == "flex"
    assert select_backend(queries(8, device="cuda"), 64, 8) == "blocked"
    for window in (None, 8):
        assert select_backend(queries(512, 64, grad=True), 512, window) == "kept"
        assert select_backend(queries(512, 64), 512, window) != "kept", "nothing to keep it for"
        assert select_backend(queries(512, 16, grad=True), 512, window) == "kept"
        assert select_backend(queries(512, 8, grad=True), 512, window) != "kept"
        reduced = select_backend(queries(512, 64, grad=True, dtype=torch.bfloat16), 512, window)
        assert (reduced == "kept") != torch.cpu._is_amx_tile_supported()
    long = queries(2048, 64, grad=True, dtype=torch.bfloat16)
    assert select_backend(long, 2048, None) == "sdpa"
    assert select_backend(queries(8192, 64, grad=True), 8192, None) == "sdpa", "too much to keep"
    assert select_backend(queries(8192, 64, grad=True), 8192, 256) == "kept"
