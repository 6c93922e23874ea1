"""Sweeps: cells, baselines, scales, cells that start from others; problems placed where they arise."""

import json
import os

import pytest

from kvlab.cli.main import main
from kvlab.errors import SpecError
from kvlab.spec import load_experiment, load_sweep
from tests.support.extensions import needs
from tests.support.spec_files import EXPERIMENT, load_sweep_text, write_spec

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


@needs("search")
def test_a_search_chooses_its_own_cells(tmp_path):
    text = (
        "question: q\nexperiment: e.yaml\n"
        "search: {choices: {model.n_kv_head: [1, 2]}, objectives: [loss], trials: 2}\n"
    )
    assert [cell.levels for cell in load_sweep_text(tmp_path, text).cells()] == [{"point": "base"}]


POSITIONS = SWEEP[SWEEP.index("  position:") : SWEEP.index("seeds:")]
SCALED = SWEEP.replace(POSITIONS, "")

SCALES = """\
scales:
  wide:
    experiment: wide.yaml
    factors: {horizon: {hybrid: {model.window: 32, model.attention_pattern: GLL}}}
    seeds: 3
"""


def load_scaled(folder, text, scale=""):
    write_spec(folder, EXPERIMENT)
    write_spec(folder, EXPERIMENT.replace("n_embd: 64", "n_embd: 128"), "wide.yaml")
    return load_sweep(write_spec(folder, text, "s.yaml"), scale)


def scale_errors(folder, text, scale):
    with pytest.raises(SpecError) as caught:
        load_scaled(folder, text, scale)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_scale_replaces_levels_and_keys_and_is_named_after_both(tmp_path, capsys):
    sweep = load_scaled(tmp_path, SCALED + SCALES, "wide")
    assert (sweep.name, sweep.seeds, sweep.source.scale) == ("s-wide", (0, 1, 2), "wide")
    cells = {tuple(cell.levels.values()): cell.experiment.model for cell in sweep.cells()}
    assert {model.n_embd for model in cells.values()} == {128}
    assert cells["mqa", "hybrid"].n_kv_head == 1
    assert cells["mha", "hybrid"].window == 32
    assert cells["mha", "global"].window is None

    command = ["plan", str(tmp_path / "s.yaml"), "--json", "--rate", "1e9", "--scale", "wide"]
    assert main([*command, "--store", str(tmp_path / "runs")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["sweep"], len(facts["trials"])) == ("s-wide", 4 * 3)
    plain, own = load_scaled(tmp_path, SCALED), load_scaled(tmp_path, SCALED + SCALES)
    assert (plain.name, plain.seeds) == (own.name, own.seeds) == ("s", (0, 1))
    assert [cell.experiment for cell in plain.cells()] == [cell.experiment for cell in own.cells()]


def test_a_problem_is_placed_at_the_scale_that_causes_it(tmp_path):
    text = SCALED + SCALES.replace("GLL", "GXX")
    load_scaled(tmp_path, text)  # the file's own scale has no such problem
    assert scale_errors(tmp_path, text, "wide").startswith("s.yaml:14:")
    missing = scale_errors(tmp_path, SCALED + SCALES.replace("wide.yaml", "no.yaml"), "wide")
    assert missing.startswith("s.yaml:13:17: experiment = no.yaml cannot be read")
    key = SCALES.replace("hybrid: {model.window", "hybrid: {window")
    assert scale_errors(tmp_path, SCALED + key, "wide").startswith("s.yaml:14:34: factors.horizon")
    of_the_file = SCALED.replace("n_kv_head: 1", "n_kv_head: 3") + SCALES
    assert scale_errors(tmp_path, of_the_file, "wide").startswith("s.yaml:6:")


STARTED = """\
question: Does it help to start from full heads?
experiment: e.yaml
factors:
  start:
    scratch: {}
    uptrained: {training.init_from: {heads: mha, start: scratch}}
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
exclude:
  - {start: uptrained, heads: mha}
"""


def test_a_cell_names_another_by_the_levels_that_differ(tmp_path):
    cells = load_sweep_text(tmp_path, STARTED).cells()
    sources = {cell.label: cell.source_levels for cell in cells}
    assert sources == {
        "start=scratch heads=mha": None,
        "start=scratch heads=mqa": None,
        "start=uptrained heads=mqa": {"start": "scratch", "heads": "mha"},
    }


def test_a_folder_is_found_beside_the_yaml_and_a_repository_stays(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(os.sep)
    for written, resolved in {
        "weights": str(tmp_path / "weights"),
        "./missing": str(tmp_path / "missing"),
        "openai-community/gpt2": "openai-community/gpt2",
    }.items():
        write_spec(tmp_path, EXPERIMENT.replace("{tokens", f"{{init_from: {written}, tokens"))
        assert load_experiment(tmp_path / "e.yaml").training.init_from == resolved
    sweep = load_sweep_text(tmp_path, STARTED.replace("{heads: mha, start: scratch}", "weights"))
    sources = {cell.experiment.training.init_from for cell in sweep.cells()}
    assert sources == {None, str(tmp_path / "weights")}
