"""Modules of users' files: what they start from, and what they say of their size."""

from pathlib import Path

import pytest
import torch

from kvlab.model import GPT
from kvlab.model.gpt import check_parameter_count
from kvlab.model.uptraining import initialize_from
from kvlab.spec import load_experiment

EXAMPLES = Path(__file__).parents[2] / "docs" / "extend"
YAML = """\
name: mine
extensions: [form.py, mixer.py]
model: {vocab_size: 257, block_size: 32, n_layer: 2, n_head: 2, n_embd: 16, kv: half_values,
  attention_pattern: GM, kinds: {M: {mixer: decayed_sum}}}
data: {tokenizer: bytes}
benchmark: {prompt_tokens: 8, new_tokens: 8}
"""
OWN = """\
        self.gain = nn.Parameter(torch.full((8,), 3.0))
        self.basis = nn.Parameter(torch.eye(8))
        self.noise = nn.Parameter(torch.randn(8))
"""
LINEAR = "        self.to_qkv, self.ln = Linear(8, 4), torch.nn.LayerNorm(4)\n"


@pytest.fixture
def config(tmp_path):
    """A model of a form and of a mixer that hold more than the examples, and do not say so."""
    form = (EXAMPLES / "half_values.py").read_text().replace("import nn", "import nn\nimport torch")
    up, _, rest = form.partition("bias=False)\n")
    (tmp_path / "form.py").write_text(f"{up}bias=False)\n{OWN}{rest}")
    mixer = (EXAMPLES / "decayed_sum.py").read_text()
    value, _, rest = mixer.partition("bias=False)\n")
    (tmp_path / "mixer.py").write_text(f"{value}bias=False)\n{LINEAR}{rest}")
    (tmp_path / "e.yaml").write_text(YAML)
    return load_experiment(tmp_path / "e.yaml").model


def test_a_module_keeps_what_it_gives_its_own_parameters_and_draws_by_the_seed(config):
    one, again, other = (GPT(config, seed=seed) for seed in (0, 0, 1))
    view = one.blocks[0].attention.kv
    assert torch.equal(view.gain, torch.full((8,), 3.0))
    assert torch.equal(view.basis, torch.eye(8))
    assert all(map(torch.equal, one.parameters(), again.parameters()))
    assert not torch.equal(view.noise, other.blocks[0].attention.kv.noise)


def test_linear_layers_and_norms_start_as_those_of_kvlab(config):
    mixer = GPT(config, seed=0).blocks[1].attention
    assert 0 < mixer.to_qkv.weight.std() < 0.03
    assert not mixer.to_qkv.bias.any()
    assert torch.equal(mixer.ln.weight, torch.ones(4))


def test_other_parameters_than_those_that_are_declared_are_refused(config):
    own, declared = 8 + 64 + 8 + 36 + 8, sum(p.numel() for p in GPT(config).parameters())
    expected = (
        f"has {declared:,} parameters, and {declared - own:,} are declared; correct up_weights"
    )
    with pytest.raises(ValueError, match=expected):
        check_parameter_count(GPT(config))


def test_vectors_of_another_size_are_not_pooled(tmp_path):
    form = (EXAMPLES / "narrow_values.py").read_text().replace('"narrow_values"', '"half_values"')
    (tmp_path / "form.py").write_text(form)
    (tmp_path / "mixer.py").write_text((EXAMPLES / "decayed_sum.py").read_text())
    (tmp_path / "e.yaml").write_text(YAML)
    eight, two = (
        load_experiment(tmp_path / "e.yaml", {"model.kv": {"half_values": {"size": size}}}).model
        for size in (8, 2)
    )
    source, model = GPT(eight, seed=0), GPT(two, seed=1)
    before = model.blocks[0].attention.qkv.weight.clone()
    done = initialize_from(model, eight, dict(source.named_parameters()))
    found, rows = model.blocks[0].attention.qkv.weight, two.layers[0].q_rows
    assert torch.equal(found[:rows], source.blocks[0].attention.qkv.weight[:rows])
    assert torch.equal(found[rows:], before[rows:])
    name = f"blocks.0.attention.qkv.weight[{rows}:]"
    assert done.fresh[name] == "the source stores vectors of other sizes"
