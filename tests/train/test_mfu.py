"""FLOPs of a training against a count over the model's own weights; peaks by exact names."""

import pytest
import torch

from kvlab.layout import training_flops
from kvlab.model import GPT
from kvlab.train import mfu
from tests.support.tiny_training import experiment


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L400", None),
    ],
)
def test_only_a_device_that_is_known_has_its_makers_figure(monkeypatch, name, stated):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(mfu, "measure_matmul_flops", lambda *_: 1.0)
    device, measured = torch.device("cuda"), (1.0, "measured")
    assert mfu.find_peak_flops(device, "bfloat16") == ((stated, "stated") if stated else measured)
    assert mfu.find_peak_flops(device, "float32") == measured


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"n_kv_head": 1},
        {"mlp": "swiglu", "position": "rope", "head_dim": 12},
        {"window": 5, "attention_pattern": "GL"},
        {"kv_sharing": "adjacent:2"},
        {"n_kv_head": 2, "n_head": 4, "n_layer": 4, "window": 3, "attention_pattern": "GLLL",
         "kv_sharing": [0, 1, 1, 3], "position": "rope"},
    ],
)  # fmt: skip
def test_flops_are_those_of_each_weight_and_each_pair(model, tied):
    of = experiment({**model, "tie_embeddings": tied})
    shape = of.model
    matrices = {name: p for name, p in GPT(shape, seed=0).named_parameters() if p.dim() == 2}
    weights = sum(p.numel() for p in matrices.values())
    weights -= shape.block_size * shape.n_embd * (shape.position == "learned")
    weights -= 0 if tied else shape.vocab_size * shape.n_embd  # looked up, not multiplied with
    total = 0
    for _ in range(shape.block_size):  # each token of one sequence
        total += 2 * weights
        for layer in range(shape.n_layer):
            pattern = shape.attention_pattern or "G"
            is_local = pattern[layer % len(pattern)] == "L"
            seen = min(shape.window, shape.block_size) if is_local else shape.block_size
            total += shape.n_head * seen * 2 * (2 * shape.head_dim)  # scores, then values
    sequences = of.training.tokens // shape.block_size
    assert training_flops(of) == 3 * total * sequences
