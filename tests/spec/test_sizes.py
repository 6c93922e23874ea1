"""`size` and `match` of a sweep: what is counted, and cells of the size of the baseline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.model import GPT
from kvlab.spec import ModelConfig
from kvlab.spec.flops import forward_flops, parameter_count
from kvlab.spec.size_config import SIZES, count_size_parameters, find_matching_width
from tests.support.extensions import needs
from tests.support.spec_files import load_sweep_text

SWEEP = """\
question: Does it shrink?
experiment: e.yaml
factors:
  model:
    tiny: {model.n_layer: 2}
    base: {}
    wide: {model.n_embd: 128, model.tie_embeddings: false}
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
size: {factor: model, predict: [1e6]}
"""


@needs("scaling")
def test_sizes_count_the_weights_that_multiply_every_token(tmp_path):
    sweep = load_sweep_text(tmp_path, SWEEP)
    sizes = count_size_parameters(sweep, sweep.cells())
    assert sweep.size.predict == (1e6,)
    for cell in sweep.cells():
        if cell.levels["heads"] == "mha":
            names = dict(GPT(cell.experiment.model).named_parameters())
            tied = cell.experiment.model.tie_embeddings
            embeddings = ("position",) if tied else ("position", "token")
            counted = [p.numel() for n, p in names.items() if not n.startswith(embeddings)]
            assert sizes[cell.levels["model"]] == sum(counted)


@needs("scaling")
def test_matched_cells_have_the_parameters_of_the_baseline_of_their_size(tmp_path):
    plain = load_sweep_text(tmp_path, SWEEP)
    sweep = load_sweep_text(tmp_path, SWEEP + "match: parameters\n")
    counts = {
        tuple(cell.levels.values()): parameter_count(cell.experiment.model)
        for cell in sweep.cells()
    }
    for cell in plain.cells():
        size, heads = cell.levels.values()
        assert counts[size, heads] == pytest.approx(counts[size, "mha"], rel=0.005)
        if heads == "mha":
            assert counts[size, heads] == parameter_count(cell.experiment.model)


MATCHED = """\
question: What does it cost at equal size?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  position:
    learned: {}
    rope: {model.position: rope}
  mlp:
    gelu: {}
    swiglu: {model.mlp: swiglu}
  sharing:
    none: {}
    trained: {model.kv_sharing: "adjacent:2"}
    tied: {serving.tie: "adjacent:2"}
"""


@pytest.mark.parametrize(
    ("match", "size"), [("parameters", parameter_count), ("flops", lambda m: forward_flops(m, 128))]
)
def test_every_cell_has_the_baselines_size_within_half_a_percent(tmp_path, match, size):
    cells = load_sweep_text(tmp_path, f"{MATCHED}match: {match}\n").cells()
    plain = load_sweep_text(tmp_path, MATCHED).cells()
    target = size(cells[0].experiment.model)
    assert cells[0].experiment == plain[0].experiment
    assert all(abs(size(cell.experiment.model) / target - 1) <= 0.005 for cell in cells)
    assert max(abs(size(cell.experiment.model) / target - 1) for cell in plain) > 0.05
    for cell, unmatched in zip(cells, plain, strict=True):  # nothing else is changed
        width = {"ffn_dim": unmatched.experiment.model.ffn_dim}
        assert cell.experiment.model.model_copy(update=width) == unmatched.experiment.model


@settings(max_examples=20)
@given(
    n_kv_head=st.sampled_from([1, 2, 4]),
    mlp=st.sampled_from(["gelu", "swiglu"]),
    bias=st.booleans(),
    n_layer=st.integers(1, 4),
    name=st.sampled_from(list(SIZES)),
    share=st.floats(0.2, 2.0),
)
def test_no_other_width_comes_nearer(n_kv_head, mlp, bias, n_layer, name, share):
    model = ModelConfig(vocab_size=64, block_size=16, n_layer=n_layer, n_head=4, n_embd=16,
                        n_kv_head=n_kv_head, mlp=mlp, bias=bias)  # fmt: skip
    size = SIZES[name]
    target = int(share * size.count(model))
    misses = [
        abs(size.count(model.model_copy(update={"ffn_dim": width})) - target)
        for width in range(1, 400)
    ]
    found = find_matching_width(model, size, target)
    assert found <= 399
    assert misses[found - 1] == min(misses)
