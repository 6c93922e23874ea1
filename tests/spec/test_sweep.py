"""Sweeps: cells, baselines, exclusions, and problems placed at the level that causes them."""

from dataclasses import replace

import pytest

from kvlab.errors import SpecError
from tests.support.spec_files import EXPERIMENT, load_sweep_text, sweep_errors

SWEEP = """\
question: What does it cost?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  horizon:
    global: {}
    hybrid: {model.window: 8, model.attention_pattern: GL}
  position:
    learned: {}
    rope: {model.position: rope}
exclude:
  - {position: learned, horizon: hybrid}
seeds: [0, 1]
"""


def test_a_number_of_seeds_counts_from_0(tmp_path):
    counted = load_sweep_text(tmp_path, SWEEP.replace("seeds: [0, 1]", "seeds: 3"))
    listed = load_sweep_text(tmp_path, SWEEP.replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
    assert counted.seeds == listed.seeds == (0, 1, 2)
    designs = SWEEP.replace("seeds: [0, 1]", "designs: {one_factor: 2, full: [5]}")
    assert load_sweep_text(tmp_path, designs).all_seeds == (0, 1, 5)


def test_cells_are_the_product_less_what_is_excluded(tmp_path):
    cells = load_sweep_text(tmp_path, SWEEP).cells()
    assert len(cells) == 6
    assert cells[0].levels == {"heads": "mha", "horizon": "global", "position": "learned"}
    assert cells[-1].experiment.model.window == 8
    assert not any(
        c.levels["horizon"] == "hybrid" and c.levels["position"] == "learned" for c in cells
    )


def test_the_baseline_comes_first_wherever_it_is_written(tmp_path):
    text = SWEEP + "baseline: {heads: mqa, position: rope}\n"
    sweep = load_sweep_text(tmp_path, text)
    assert sweep.baseline == {"heads": "mqa", "horizon": "global", "position": "rope"}
    assert sweep.cells()[0].levels == sweep.baseline


def test_the_name_is_the_files_and_levels_may_look_like_numbers(tmp_path):
    text = SWEEP.replace("mha: {}", "4: {}").replace("mqa:", "1:") + "baseline: {heads: 4}\n"
    sweep = load_sweep_text(tmp_path, text, "my-sweep.yaml")
    assert sweep.name == "my-sweep"
    assert sweep.baseline["heads"] == "4"


TOKENIZERS = """\
question: q
experiment: e.yaml
factors:
  text:
    bytes: {evaluation.loss_bytes: 1000}
    pairs: {evaluation.loss_bytes: 1000, data.tokenizer: "gpt2:260"}
"""


def test_cells_of_several_tokenizers_are_scored_on_the_same_text(tmp_path):
    assert len(load_sweep_text(tmp_path, TOKENIZERS).cells()) == 2
    message = (
        "s.yaml:6:81: data.tokenizer = gpt2:260 is not the baseline's bytes, and"
        " data.max_tokens takes other documents for every tokenizer; set data.max_bytes"
    )
    limited = TOKENIZERS.replace("data.tokenizer", "data.max_tokens: 1000, data.tokenizer")
    assert message in sweep_errors(tmp_path, limited)
    for old in ("evaluation.loss_bytes: 1000}", "evaluation.loss_bytes: 1000, "):
        message = sweep_errors(tmp_path, TOKENIZERS.replace(old, "}" if old[-1] == "}" else ""))
        assert "evaluation.loss_tokens scores other text for every tokenizer; set" in message
        assert message.startswith("s.yaml:6:")


def test_problems_of_the_base_experiment_stand_in_its_file(tmp_path):
    (tmp_path / "bad.yaml").write_text(EXPERIMENT.replace("n_layer: 6", "n_layer: x"))
    text = SWEEP.replace("e.yaml", "bad.yaml")
    assert sweep_errors(tmp_path, text).startswith("bad.yaml:2:18: model.n_layer = x")


def test_a_combination_that_fails_names_its_cell(tmp_path):
    text = SWEEP.replace("model.n_kv_head: 1", "model.n_kv_head: 4").replace(
        "rope: {model.position: rope}", "rope: {model.n_head: 2, model.position: rope}"
    )
    message = sweep_errors(tmp_path, text)
    assert "model.n_kv_head = 4 does not divide n_head = 2" in message
    assert message.startswith("s.yaml:6:")


def test_a_hostile_file_name_is_no_sweep_name(tmp_path):
    with pytest.raises(SpecError, match="is not a usable name"):
        load_sweep_text(tmp_path, SWEEP, "A b.yaml")


def test_problems_of_the_sweep_and_of_its_levels_are_shown_together(tmp_path):
    text = SWEEP.replace("n_kv_head: 1", "n_kv_heads: 1").replace("[0, 1]", "[0, one]")
    lines = sweep_errors(tmp_path, text).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["s.yaml:6:11", "s.yaml:15:12"]


def test_checking_a_sweep_changes_no_other_sweep_of_the_same_file(tmp_path):
    sweep = load_sweep_text(tmp_path, SWEEP)
    other = sweep.with_source(replace(sweep.source, base={**sweep.source.base, "name": "other"}))
    assert other.cells()[0].experiment.name == "other"
    assert sweep.cells()[0].experiment.name == "small"


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("", ""),
        ("factors: {heads: {mha: {}}}\n", "factors = {...} cannot be combined with search"),
        ("cells: [{point: base}]\n", "cells = [{'point': 'base'}] cannot be combined with search"),
        ("seeds: [0, 1]\n", "has several seeds, and a search trains each suggestion once"),
    ],
)
def test_a_search_chooses_its_own_cells(tmp_path, tail, message):
    text = (
        "question: q\nexperiment: e.yaml\n"
        "search: {choices: {model.n_kv_head: [1, 2]}, objectives: [loss], trials: 2}\n"
    )
    if message:
        assert message in sweep_errors(tmp_path, text + tail)
    else:
        assert [cell.levels for cell in load_sweep_text(tmp_path, text).cells()] == [
            {"point": "base"}
        ]


def test_what_a_sweep_decides(tmp_path):
    sweep = load_sweep_text(tmp_path, SWEEP + "decide: {margin: 0.02, claims: [heads=mqa]}\n")
    assert (sweep.decide.margin, sweep.decide.claims) == (0.02, ("heads=mqa",))
    default = load_sweep_text(tmp_path, SWEEP).decide
    assert (default.margin, default.metric, default.claims, default.alpha) == (
        None,
        None,
        None,
        0.05,
    )
    assert load_sweep_text(tmp_path, SWEEP + "decide: {margin: 1}\n").decide.margin == 1.0
    text = "decide: {over: {heads: [mha, mqa]}, reference: [heads]}\n"
    compared = load_sweep_text(tmp_path, SWEEP + text).decide
    assert (compared.over, compared.reference) == ({"heads": ("mha", "mqa")}, ("heads",))
    assert (default.over, default.reference) == (None, None)
