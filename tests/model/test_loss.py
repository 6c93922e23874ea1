"""The chunked loss against torch's own over all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.layout.training_memory import LOSS_CHUNK_TOKENS
from kvlab.model import loss
from kvlab.model.loss import summed_loss, token_losses, token_scores


def case(count, dtype=torch.float64, width=7, vocabulary=31):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, width, generator=generator, dtype=dtype) * 3
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("count", [1, LOSS_CHUNK_TOKENS["cpu"], 2 * LOSS_CHUNK_TOKENS["cpu"] + 3])
def test_value_and_gradients_are_those_of_plain_cross_entropy(count):
    hidden, weight, targets = case(count)
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    expected = torch.autograd.grad(plain / 7, [hidden, weight])
    ours = summed_loss(hidden, weight, targets)
    actual = torch.autograd.grad(ours / 7, [hidden, weight])
    assert abs(ours.item() - plain.item()) < 1e-9 * plain.item()
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() < 1e-11
    losses = token_losses(hidden.view(1, count, -1), weight, targets.view(1, count))
    assert losses.shape == (1, count)
    assert torch.allclose(losses.sum(), ours)


def test_the_summed_loss_of_nearly_impossible_targets_is_exact_and_its_gradient_finite():
    hidden, weight, targets = case(3, torch.float32)
    with torch.no_grad():
        hidden *= 1e3
    actual = summed_loss(hidden, weight, targets)
    expected = F.cross_entropy((hidden @ weight.T).double(), targets, reduction="sum")
    assert abs(actual.item() - expected.item()) < 1e-5 * expected.item()
    assert torch.autograd.grad(actual, hidden)[0].isfinite().all()
    losses = token_losses(hidden, weight, targets)
    assert losses.max() > 200, "the probability itself would be zero in float32"
    assert torch.allclose(losses, F.cross_entropy(hidden @ weight.T, targets, reduction="none"))


def test_a_second_backward_pass_is_refused():
    """The gradients are scaled in place."""
    hidden, weight, targets = case(5)
    loss = summed_loss(hidden, weight, targets) / 7
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_under_autocast_products_are_bfloat16_and_gradients_keep_the_parameters_dtype():
    hidden, weight, targets = case(2000, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = summed_loss(hidden, weight, targets)
    actual = torch.autograd.grad(ours, [hidden, weight])
    exact = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    expected = torch.autograd.grad(exact, [hidden, weight])
    assert ours.dtype == torch.float32
    assert 0 < abs(ours.item() - exact.item()) < 1e-2 * exact.item()
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-2 * b.norm()


def test_a_fused_kernel_that_overwrites_the_logits_takes_the_place_of_the_softmax(monkeypatch):
    """As on CUDA: nothing of the size of the logits is made beside them."""

    def fused(logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        logits.sub_(logits.logsumexp(1, keepdim=True)).exp_()
        logits[range(len(targets)), targets] -= 1
        return losses

    hidden, weight, targets = case(1100)
    expected = summed_loss(hidden, weight, targets)
    gradients = torch.autograd.grad(expected, [hidden, weight])
    monkeypatch.setattr(loss, "are_kernels_usable", lambda _device: True)
    monkeypatch.setattr(loss, "cross_entropy_in_place", fused)
    monkeypatch.setattr(torch, "softmax", None)
    for compile in (False, True):
        actual = summed_loss(hidden, weight, targets, compile=compile)
        assert abs(actual - expected) < 1e-9
        for a, b in zip(torch.autograd.grad(actual, [hidden, weight]), gradients, strict=True):
            assert (a - b).abs().max() < 1e-11


def test_on_cuda_the_weights_gradient_is_summed_in_float32():
    """A product of bfloat16 matrices is not rounded to bfloat16 before it is added."""
    with FakeTensorMode():
        half = {"dtype": torch.bfloat16, "device": "cuda"}
        left, right, total = torch.empty(5, 7, **half), torch.empty(7, 3, **half), torch.empty(
            5, 3, device="cuda")  # fmt: skip
        with NotedProducts() as noted:
            loss._add_product(total, left, right)
    assert (noted.products, noted.names) == ([torch.float32], ["addmm.dtype_out"])


class NotedProducts(TorchDispatchMode):
    """Notes the names of operations, and the dtypes of products."""

    def __init__(self):
        super().__init__()
        self.products, self.names = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a fake tensor of CUDA cannot be written where torch has no CUDA
        out = (kwargs or {}).get("out")
        out = func(*args, **(kwargs or {})) if out is None else out
        self.names.append(func.__name__)
        if "mm" in func.__name__:
            self.products.append(out.dtype)
        return out


def test_losses_alone_ask_for_no_likeliest_token():
    hidden, weight, targets = case(5)
    with NotedProducts() as noted:
        token_losses(hidden, weight, targets)
    assert "argmax" not in " ".join(noted.names)


def test_of_equally_likely_tokens_only_the_first_is_the_likeliest():
    head = torch.eye(6)[[0, 1, 2, 1, 2, 5]]  # tokens 1 and 3, and 2 and 4, have equal logits
    hidden = torch.eye(6)[[1, 1, 2, 2, 5, 5, 0]].clone()
    targets = torch.tensor([1, 3, 2, 4, 5, 0, 1])
    losses, hits = token_scores(hidden, head, targets)
    assert hits.tolist() == [True, False, True, False, True, False, False]
    expected = F.cross_entropy(hidden @ head.T, targets, reduction="none")
    assert (losses - expected).abs().max() < 1e-6
