"""Muon: a step against one that is written out, resume, and what it keeps."""

import math

import pytest
import torch
from torch.optim import AdamW

from kvlab.extensions.muon.muon import Muon, make_muon
from kvlab.layout.training_memory import training_peak_bytes
from kvlab.model import GPT
from kvlab.spec.flops import matrix_weights, parameter_count
from kvlab.train.checkpoint import resume_identity
from tests.support.tiny_training import experiment, model
from tests.train.test_checkpoint import check_resumed
from tests.train.test_distributed import check_two_workers

MUON = {"optimizer": "muon"}


def orthogonalize(matrix):
    """Five Newton-Schulz iterations of Jordan et al., as in their post."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        return orthogonalize(matrix.T).T
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


class Plain:
    """Momentum, Nesterov, orthogonalized, scaled, with decoupled decay: one matrix."""

    def __init__(self, weight, decay):
        self.weight, self.decay, self.momentum = weight.clone(), decay, torch.zeros_like(weight)

    def step(self, grad, rate):
        self.momentum = 0.95 * self.momentum + 0.05 * grad
        update = orthogonalize(0.05 * grad + 0.95 * self.momentum)
        scale = 0.2 * math.sqrt(max(grad.shape))
        self.weight = self.weight * (1 - rate * self.decay) - rate * scale * update


def test_steps_are_those_written_out():
    of = experiment({"mlp": "swiglu"}, MUON)
    net, t = GPT(of.model, seed=1, dtype=torch.float64), of.training
    optimizer = make_muon(net, t)
    first = {name: p.detach().clone() for name, p in net.named_parameters()}
    is_hidden = {f"{name}.weight" for name in net.linear_layers()}
    assert {n for n in first if ".attention.qkv.weight" in n or ".mlp.up.weight" in n} < is_hidden
    plain = {name: Plain(first[name], t.weight_decay) for name in is_hidden}
    others = {name: p.clone().requires_grad_() for name, p in first.items() if name not in plain}
    adamw = AdamW(
        [
            {"params": [p for p in others.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in others.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(t.beta1, t.beta2),
        eps=t.adam_eps,
    )
    generator = torch.Generator().manual_seed(5)
    for rate in (1e-2, 2e-2, 5e-3):
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = rate
        for name, parameter in net.named_parameters():
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = grad
            if name in plain:
                plain[name].step(grad, rate)
            else:
                others[name].grad = grad.clone()
        optimizer.step()
        adamw.step()
    optimizer.zero_grad()
    for name, parameter in net.named_parameters():
        assert parameter.grad is None
        if name in plain:
            assert (parameter - plain[name].weight).abs().max() < 1e-10, name
        else:
            assert (parameter - others[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_it_is_the_muon_of_torch(shape, monkeypatch):
    """Whose iterations are in bfloat16, unless that is the identity."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(shape, generator=generator, dtype=torch.float64)
    one, other = (torch.nn.Parameter(first.clone()) for _ in range(2))
    own = Muon([one], 1e-2, 0.1)
    torchs = torch.optim.Muon([other], 1e-2, 0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        one.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        other.grad = one.grad.clone()
        own.step()
        torchs.step()
        assert (one - other).abs().max() < 1e-12


def test_it_resumes_bitwise(tmp_path):
    check_resumed(tmp_path, {"training": MUON})
    with_muon, without = (experiment(training=one) for one in (MUON, {}))
    assert resume_identity(with_muon, 2, 100) != resume_identity(without, 2, 100)


def test_two_workers_train_as_one(tmp_path):
    check_two_workers(tmp_path, {}, {**MUON, "tokens": 64 * 6, "evaluate_every": 3}, 1e-4)


def test_a_matrix_has_one_moment():
    of = experiment({"kv_sharing": "adjacent:2", "mlp": "geglu"}, MUON)
    net = model(of)
    optimizer = make_muon(net, of.training)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = sum(
        value.numel()
        for own in optimizer.state.values()
        for key, value in own.items()
        if key != "step"
    )
    hidden = matrix_weights(of.model) - of.model.vocab_size * of.model.n_embd
    assert moments == 2 * parameter_count(of.model) - hidden
    adamw = experiment({"kv_sharing": "adjacent:2", "mlp": "geglu"})
    assert training_peak_bytes(adamw) - training_peak_bytes(of) == 4 * hidden
