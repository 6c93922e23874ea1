"""`match`: every cell gets the baseline's parameters or FLOPs by the width of its MLP."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.spec import ModelConfig
from kvlab.spec.flops import forward_flops, parameter_count
from kvlab.spec.size_config import SIZES, find_matching_width
from kvlab.sweep import plan
from tests.support.spec_files import load_sweep_text, sweep_errors
from tests.support.stub_trials import identify

SWEEP = """\
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
BOTH = "match: [none, parameters]\n"


def flops_per_token(model: ModelConfig) -> float:
    return 3 * forward_flops(model, model.block_size) / model.block_size


@pytest.mark.parametrize(
    ("match", "size"), [("parameters", parameter_count), ("flops", flops_per_token)]
)
def test_every_cell_has_the_baselines_size_within_half_a_percent(tmp_path, match, size):
    cells = load_sweep_text(tmp_path, f"{SWEEP}match: {match}\n").cells()
    plain = load_sweep_text(tmp_path, SWEEP).cells()
    target = size(cells[0].experiment.model)
    assert cells[0].experiment == plain[0].experiment
    assert all(abs(size(cell.experiment.model) / target - 1) <= 0.005 for cell in cells)
    assert max(abs(size(cell.experiment.model) / target - 1) for cell in plain) > 0.05
    for cell, unmatched in zip(cells, plain, strict=True):  # nothing else is changed
        width = {"ffn_dim": unmatched.experiment.model.ffn_dim}
        assert cell.experiment.model.model_copy(update=width) == unmatched.experiment.model


@settings(max_examples=40, deadline=None)
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


def test_several_ways_are_a_factor_and_unchanged_cells_are_the_same_trials(tmp_path):
    planned = plan(load_sweep_text(tmp_path, SWEEP + BOTH), identify=identify)
    alone = plan(load_sweep_text(tmp_path, SWEEP), identify=identify)
    trials = {tuple(cell.levels.values()): cell.trials[0] for cell in planned.cells}
    assert len(trials) == 2 * len(alone.cells)
    assert [trials[*cell.levels.values(), "none"] for cell in alone.cells] == [
        cell.trials[0] for cell in alone.cells
    ]
    base = ("mha", "learned", "gelu")
    for sharing in ("none", "tied"):
        assert trials[*base, sharing, "none"] == trials[*base, sharing, "parameters"]
    mqa = ("mqa", *base[1:], "none")
    assert trials[*mqa, "none"] != trials[*mqa, "parameters"]


def test_every_size_has_a_baseline_of_its_own(tmp_path):
    text = SWEEP.split("  position:")[0] + (
        "  model:\n    small: {}\n    middle: {model.n_layer: 12}\n"
        "    large: {model.n_layer: 12, model.ffn_dim: 512}\n"
        "size: {factor: model}\n"
    )
    plain = load_sweep_text(tmp_path, text).cells()
    cells = load_sweep_text(tmp_path, text + "match: parameters\n").cells()
    counts = {tuple(c.levels.values()): parameter_count(c.experiment.model) for c in cells}
    for cell in plain:
        heads, size = cell.levels.values()
        if heads == "mha":
            assert counts[heads, size] == parameter_count(cell.experiment.model)
        assert abs(counts[heads, size] / counts["mha", size] - 1) <= 0.005


def test_a_tie_at_serving_shares_the_training_of_its_matched_cell(tmp_path):
    planned = plan(load_sweep_text(tmp_path, SWEEP + "match: parameters\n"), identify=identify)
    trainings = {one.trial.training_id for one in planned.trials}
    assert len(planned.trials) == 24
    assert len(trainings) == 16


@pytest.mark.parametrize("design", ["one_factor", "pairwise", "fractional:2"])
def test_every_cell_of_a_design_is_sized_in_every_way(tmp_path, design):
    text = SWEEP.replace('    tied: {serving.tie: "adjacent:2"}\n', "") + f"design: {design}\n"
    alone = load_sweep_text(tmp_path, text).cells()
    both = load_sweep_text(tmp_path, text + BOTH).cells()
    assert {tuple(cell.levels.values()) for cell in both} == {
        (*cell.levels.values(), way) for cell in alone for way in ("none", "parameters")
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model.n_kv_head: 1", "model.ffn_dim: 96",
         "s.yaml:6:26: model.ffn_dim = 96 is set by a level, and match sets it by cell; remove one"),
        ("model.n_kv_head: 1", "model.n_layer: 40",
         "s.yaml:6:26: model.ffn_dim cannot bring this cell within 0.5% of the baseline's 327,424"
         " parameters: 1 gives 711,080 (+117.17%), 2 gives 716,240 (+118.75%) (in the cell heads:"
         " mqa, position: learned, mlp: gelu, sharing: none; exclude it or change a level)"),
        ("model.n_kv_head: 1", "model.n_kv_head: 1, training.init_from: {heads: mha}",
         "s.yaml:6:51: match makes the MLP 304 wide instead of 256, so the weights of"
         " training.init_from do not fit it; remove one"),
        ("match: parameters", "match: parameter",
         "s.yaml:17:8: match = parameter is not one of none, parameters, flops; did you mean parameters?"),
        ("match: parameters", "match: []", "s.yaml:17:8: match = [] has too few entries"),
        ("match: parameters", "match: [none, none]",
         "s.yaml:17:8: match = ['none', 'none'] names a way twice; name each once"),
        ("match: parameters", BOTH + "when: {match: {heads: mqa}}",
         "s.yaml:18:15: when.match = {...} is crossed with every cell of the design; leave it out"),
        ("match: parameters", BOTH + "design: cells\ncells: [{heads: mqa, match: none}]",
         "cells.0.match = none is crossed with every cell of the design; leave it out"),
        ("  heads:", "  match: {a: {}, b: {model.n_kv_head: 1}}\n  heads:", ""),
    ],
)  # fmt: skip
def test_refusals(tmp_path, old, new, message):
    text = (SWEEP + "match: parameters\n").replace(old, new)
    if message:
        assert message in sweep_errors(tmp_path, text)
    else:  # a factor of that name is anyone's, until there are several ways
        matched, plain = (
            load_sweep_text(tmp_path, t).cells() for t in (text, text[: text.rindex("match:")])
        )
        assert [c.experiment for c in matched] != [c.experiment for c in plain]
        text = text.replace("match: parameters", BOTH)
        assert "factors.match = {...} is a factor already" in sweep_errors(tmp_path, text)


def test_a_search_refuses_it(tmp_path):
    text = "question: q\nexperiment: e.yaml\nsearch: {objectives: [loss], choices: {model.n_kv_head: [1, 2]}, trials: 3}\n"
    assert "match = parameters cannot be combined with search" in sweep_errors(
        tmp_path, text + "match: parameters\n"
    )
