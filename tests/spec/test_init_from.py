"""`training.init_from`: what it may name, and where a wrong name is shown."""

import os

from kvlab.spec import load_experiment
from tests.support.spec_files import EXPERIMENT, load_sweep_text, sweep_errors, write_spec

SWEEP = """\
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
    cells = load_sweep_text(tmp_path, SWEEP).cells()
    sources = {cell.label: cell.source_levels for cell in cells}
    assert sources == {
        "start=scratch heads=mha": None,
        "start=scratch heads=mqa": None,
        "start=uptrained heads=mqa": {"start": "scratch", "heads": "mha"},
    }


def test_a_cell_starts_from_one_of_its_tokenizer_that_does_not_start_from_it(tmp_path):
    text = SWEEP.replace("scratch: {}", "scratch: {evaluation.loss_bytes: 64}")
    text = text.replace("uptrained: {", "uptrained: {evaluation.loss_bytes: 64, ")
    tokenizer = 'data.tokenizer: "gpt2:300", model.vocab_size: 400'
    text = text.replace("n_kv_head: 1", f"n_kv_head: 1, {tokenizer}")
    assert "give both cells one tokenizer" in sweep_errors(tmp_path, text)
    text = SWEEP.replace("scratch: {}", "scratch: {training.init_from: {start: uptrained}}")
    text = text.replace("{heads: mha, start: scratch}", "{start: scratch}")
    message = sweep_errors(tmp_path, text.split("exclude")[0])
    assert "training.init_from = {start: uptrained} is circular" in message
    assert "s.yaml:5:35" in message


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
    sweep = load_sweep_text(tmp_path, SWEEP.replace("{heads: mha, start: scratch}", "weights"))
    sources = {cell.experiment.training.init_from for cell in sweep.cells()}
    assert sources == {None, str(tmp_path / "weights")}
