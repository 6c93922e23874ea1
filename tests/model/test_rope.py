"""Rotary positions against complex multiplication, and their derivative against autograd's."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from kvlab.cache import DocumentMask
from kvlab.model import GPT
from kvlab.model.rope import RotaryTables, apply_rope, make_rope_table
from kvlab.spec import TrainingConfig
from kvlab.spec.model_config import ModelConfig
from kvlab.train.train_step import SummedLoss

THETA = 10_000.0


def rotate_by_complex_numbers(x, positions):
    """Rotate each pair (i, i + D/2), as a complex number, by position times its frequency."""
    pairs = x.shape[-1] // 2
    number = torch.complex(x[..., :pairs], x[..., pairs:])
    frequency = THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = positions[..., None].double() * frequency
    if angle.dim() == 3:
        angle = angle[:, None]
    rotated = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("positions", [torch.arange(7) + 90, torch.tensor([[3] * 7, [50] * 7])])
def test_pairs_rotate_as_complex_numbers_do(positions):
    token_by_token = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    x = token_by_token.transpose(1, 2)
    actual = apply_rope(x, make_rope_table(positions, 8, THETA, torch.float64))
    expected = rotate_by_complex_numbers(x, positions)
    assert (actual - expected).abs().max() < 1e-12
    outer = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(actual, token_by_token, outer)
    (expected_gradient,) = torch.autograd.grad(expected, token_by_token, outer)
    assert (gradient - expected_gradient).abs().max() < 1e-12
    with torch.no_grad():
        assert torch.equal(
            apply_rope(x, make_rope_table(positions, 8, THETA, torch.float64)), actual
        )


def test_a_smaller_type_is_rounded_once():
    x = torch.randn(1, 2, 7, 8).bfloat16().requires_grad_()
    table = make_rope_table(torch.arange(7), 8, THETA, torch.float32)
    actual = apply_rope(x, table)
    actual.backward(torch.ones_like(actual))
    assert actual.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(actual, apply_rope(x.float(), table).bfloat16())


def test_the_compiled_gradient_is_the_same():
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=True)
    table = make_rope_table(torch.arange(7), 8, THETA, torch.float64)
    compiled = torch.compile(apply_rope, backend="eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(apply_rope(x, table).square().sum(), x)
    (expected_gradient,) = torch.autograd.grad(compiled(x, table).square().sum(), x)
    assert (gradient - expected_gradient).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tables_hold_the_same_bits_as_angles_computed_in_place(dtype):
    tables = RotaryTables(8, THETA)
    with torch.inference_mode():
        tables.prepare(3, torch.device("cpu"), dtype)  # is to grow, and to serve a training
    documents = DocumentMask(torch.tensor([[5, 0, 5, 5, 0, 5]]), 0).positions
    for positions in (torch.arange(9), torch.arange(70, 75), torch.tensor([[3], [50]]), documents):
        table = tables.at(positions, int(positions.max()) + 1, dtype)
        expected = make_rope_table(positions, 8, THETA, dtype)
        for part, expected_part in zip(table, expected, strict=True):
            assert torch.equal(part, expected_part)
            assert not part.is_inference()


@pytest.mark.parametrize("document_start", [None, 0])
def test_no_kernel_of_a_compiled_training_computes_angles(document_start, monkeypatch):
    graphs = []

    def record(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend=backend, fullgraph=True))
    model = GPT(ModelConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16,
                            position="rope", rope_theta=THETA))  # fmt: skip
    loss = SummedLoss(model, TrainingConfig(compile=True), document_start)
    loss.compiles = False  # the head is another graph
    tokens = torch.randint(11, (2, 8))
    loss(tokens, tokens).backward()
    loss(tokens, tokens).backward()
    assert len(graphs) == 2, "forward and backward, compiled once"
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    values = [node.meta["val"] for node in nodes if "val" in node.meta]
    assert not [n for n in nodes if any(word in str(n.target) for word in ("cos.", "sin.", "pow"))]
    assert torch.float64 not in {v.dtype for v in values if isinstance(v, torch.Tensor)}
