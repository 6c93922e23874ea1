"""`size` of a sweep: its factor, what is counted, and how far may be predicted."""

import pytest

from kvlab.model import GPT
from kvlab.spec.flops import parameter_count
from kvlab.spec.size_config import count_size_parameters
from tests.support.spec_files import load_sweep_text, sweep_errors

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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size: {factor: model,", "exclude: [{model: tiny, heads: mqa}, {model: wide, heads: [mha, mqa]}]\nsize: {factor: model,",
         "s.yaml:12:16: size.factor = model has cells of 2 sizes, and a trend needs 3"),
        ("  heads:\n    mha: {}\n    mqa: {model.n_kv_head: 1}\n", "",
         "s.yaml:8:16: size.factor = model is the only factor"),
    ],
)  # fmt: skip
def test_what_gives_no_trend_is_refused_where_it_is_written(tmp_path, old, new, message):
    assert old in SWEEP
    assert message in sweep_errors(tmp_path, SWEEP.replace(old, new))
