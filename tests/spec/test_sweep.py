"""Sweeps: cells, baselines, exclusions, and problems placed at the level that causes them."""

import pytest

from kvlab.errors import SpecError
from tests.support.spec_files import load_sweep_text, sweep_errors

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
    with pytest.raises(SpecError, match="is not a usable name"):
        load_sweep_text(tmp_path, SWEEP, "A b.yaml")


def test_a_search_chooses_its_own_cells(tmp_path):
    text = (
        "question: q\nexperiment: e.yaml\n"
        "search: {choices: {model.n_kv_head: [1, 2]}, objectives: [loss], trials: 2}\n"
    )
    assert [cell.levels for cell in load_sweep_text(tmp_path, text).cells()] == [{"point": "base"}]
    for key in ("cells: [{point: base}]", "match: parameters"):
        assert "cannot be combined with search" in sweep_errors(tmp_path, f"{text}{key}\n")
