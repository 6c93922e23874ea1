"""The CPU kernels against their plain code and float64, their table, and how one is added."""

from runpy import run_path

import pytest
import torch
import torch.nn.functional as F

from kvlab.layout.training_memory import saved_probability_bytes
from kvlab.model.causal_mask import CausalMask
from kvlab.model.kernels import KERNELS, cpu_kernel
from kvlab.model.kernels.gelu import gelu
from kvlab.model.kernels.linear import TWO_COLUMN_MAX_INPUTS, Linear, linear, matmul_transposed
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.model.kernels.rotate_pairs import rotate_pairs
from kvlab.model.kernels.tiled_attention import attend_tiled, tiled_attention
from kvlab.model.rope import make_rope_table
from tests.contracts.attention_backend_contract import random_documents
from tests.contracts.cpu_kernel_contract import CPUKernelContract


def random_case(rows, inputs, outputs, requires_grad, has_bias=True):
    torch.manual_seed(0)
    bias = torch.randn(outputs) if has_bias else None
    case = [torch.randn(*rows, inputs), torch.randn(outputs, inputs), bias]
    return [part if part is None else part.requires_grad_(requires_grad) for part in case]


HAS_ONEDNN = torch.backends.mkldnn.is_available()


class TestLinearKernel(CPUKernelContract):
    kernel = linear
    is_here = HAS_ONEDNN

    def cases(self):
        shapes = [((1,), 48, 701), ((2, 1), 96, 1000), ((64,), 768, 2304)]
        widest = TWO_COLUMN_MAX_INPUTS
        edges = [((1,), widest, 1000), ((1, 2), widest + 1, 1000), ((17,), widest, 1000)]
        yield from (random_case(*shape, False) for shape in [*shapes, *edges])
        yield from (random_case(*shape, True, has_bias=False) for shape in shapes)
        yield from (random_case(*shape, True) for shape in [*shapes, ((3, 5), 24, 10)])
        frozen = [random_case((3, 5), 24, 10, is_trained) for is_trained in (False, True)]
        yield from ([frozen[i][0], *frozen[1 - i][1:]] for i in range(2))


class TestMatmulKernel(CPUKernelContract):
    kernel = matmul_transposed
    is_here = HAS_ONEDNN

    def cases(self):
        yield [torch.randn(200, 64), torch.randn(500, 64)]


def test_takes_parts_and_gradients_of_any_layout_in_training():
    """As attention gives them: rows of a weight, transposed inputs, an expanded gradient."""
    torch.manual_seed(3)
    x, weight, bias = torch.randn(64, 50).T, torch.randn(90, 64), torch.randn(90)
    given = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    exact = [part.detach().double().requires_grad_() for part in given]
    linear(x, weight[:30], bias[:30]).sum().backward()
    F.linear(exact[0], exact[1][:30], exact[2][:30]).sum().backward()
    for ours, theirs in zip(given, exact, strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-4


def test_autocast_is_obeyed_in_training():
    layer, x = Linear(24, 10), torch.randn(50, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


class TestGeluKernel(CPUKernelContract):
    kernel = gelu

    def cases(self):
        torch.manual_seed(0)
        yield [torch.randn(300, 100) * 3]
        shapes = [(1,), (0, 4), (3, 7, 5), (257, 1024)]
        yield from ([torch.randn(shape).requires_grad_()] for shape in shapes)
        yield [torch.randn(30, 20).T.requires_grad_()]


def test_far_from_zero_it_is_the_identity_or_nothing():
    x = torch.tensor([-1e4, -50.0, 50.0, 1e4], requires_grad=True)
    gelu(x).sum().backward()
    assert torch.equal(gelu(x).abs(), torch.tensor([0.0, 0.0, 50.0, 1e4]))
    assert torch.equal(x.grad, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    with torch.no_grad():
        many = gelu(x.repeat(5000))
    assert torch.equal(many.abs(), torch.tensor([0.0, 0.0, 50.0, 1e4]).repeat(5000))


def test_bfloat16_is_rounded_once():
    x = torch.randn(2000).bfloat16().requires_grad_()
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))


class TestRotatePairsKernel(CPUKernelContract):
    kernel = rotate_pairs

    def cases(self):
        torch.manual_seed(0)
        for positions in (torch.arange(7) + 90, torch.tensor([[3] * 7, [50] * 7])):
            table = make_rope_table(positions, 8, 10_000.0, torch.float32)
            for requires_grad in (False, True):
                yield [torch.randn(2, 3, 7, 8).requires_grad_(requires_grad), *table]


class TestTiledAttentionKernel(CPUKernelContract):
    """See also the suite of attention backends."""

    kernel = tiled_attention

    def cases(self):
        torch.manual_seed(0)
        for window in (None, 40):
            for documents in (None, random_documents(300)):
                heads = (4, 2, 2)
                inputs = [torch.randn(2, n, 300, 16).requires_grad_() for n in heads]
                yield [*inputs, CausalMask(window, 0, documents)]


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (40, 0), (40, 3), (100, 70)])
def test_tiles_save_the_bytes_of_the_estimate(window, sinks):
    q, k, v = (torch.randn(2, 3, 300, 16, requires_grad=True) for _ in range(3))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        attend_tiled(q, k, v, CausalMask(window, sinks))
    expected = saved_probability_bytes(
        2, 3, 16, 300, window, sinks, is_bfloat16=False, has_sink=False
    )
    assert sum(t.nbytes for t in saved) == expected + q.nbytes + k.nbytes + v.nbytes


def test_every_kernel_has_its_suite():
    """What frees no tensor and computes none has tests of its own."""
    tested = {id(suite.kernel) for suite in CPUKernelContract.__subclasses__()}
    assert tested == {id(k) for k in KERNELS.values()} - {id(keep_freed_memory)}


def test_the_environment_turns_kernels_off_by_name(monkeypatch):
    monkeypatch.setenv("KVLAB_PLAIN", "gelu,linear")
    made = run_path(cpu_kernel.__file__)["CPUKernel"]  # as in a new process
    kernels = [made(kernel.name, kernel.plain, lambda: abs) for kernel in KERNELS.values()]
    assert {kernel.name for kernel in kernels if not kernel.is_fast()} == {"gelu", "linear"}
    assert {kernel.name for kernel in kernels} == set(KERNELS)
