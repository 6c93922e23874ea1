"""`training.init_from`: what it may name, and where a wrong name is shown."""

import os

import pytest

from kvlab.spec import load_experiment, load_sweep
from kvlab.spec.init_from import get_source_levels
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
    sources = {
        cell.label: get_source_levels(cell) for cell in load_sweep_text(tmp_path, SWEEP).cells()
    }
    assert sources == {
        "start=scratch heads=mha": None,
        "start=scratch heads=mqa": None,
        "start=uptrained heads=mqa": {"start": "scratch", "heads": "mha"},
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{heads: mha, start: scratch}", "{haeds: mha}",
         "s.yaml:6:45: training.init_from.haeds = mha is not a factor; did you mean heads?"),
        ("{heads: mha, start: scratch}", "{heads: mhaa}",
         "s.yaml:6:45: training.init_from.heads = mhaa is not a level of heads; did you mean mha?"),
        ("{heads: mha, start: scratch}", "{heads: mha}",
         "s.yaml:6:37: training.init_from = {heads: mha} is the cell start=uptrained heads=mha,"
         " which is not in the design; include it"),
        ("{heads: mha, start: scratch}", "{heads: mqa}", "is circular for the cell"),
        ("{heads: mha, start: scratch}", "7",
         "s.yaml:6:37: training.init_from = 7 is not a folder, a repository or factor levels"),
        ("{heads: mha, start: scratch}", "{}", "is not a folder, a repository or factor levels"),
        ("n_kv_head: 1", "n_kv_head: 1, model.n_embd: 32",
         "whose n_embd = 64 is not 32, so no weight fits"),
    ],
)  # fmt: skip
def test_refusals(tmp_path, old, new, message):
    text = SWEEP if old not in SWEEP else SWEEP.replace(old, new, 1)
    assert message in sweep_errors(tmp_path, text)


def test_a_cell_cannot_start_from_weights_of_another_tokenizer(tmp_path):
    text = SWEEP.replace("scratch: {}", "scratch: {evaluation.loss_bytes: 64}")
    text = text.replace("uptrained: {", "uptrained: {evaluation.loss_bytes: 64, ")
    tokenizer = 'data.tokenizer: "gpt2:300", model.vocab_size: 400'
    text = text.replace("n_kv_head: 1", f"n_kv_head: 1, {tokenizer}")
    assert "give both cells one tokenizer" in sweep_errors(tmp_path, text)


def test_a_circle_of_two_cells_is_refused(tmp_path):
    text = SWEEP.replace("scratch: {}", "scratch: {training.init_from: {start: uptrained}}")
    text = text.replace("{heads: mha, start: scratch}", "{start: scratch}")
    message = sweep_errors(tmp_path, text.split("exclude")[0])
    assert "training.init_from = {start: uptrained} is circular" in message
    assert "s.yaml:5:35" in message


def test_a_folder_is_found_beside_the_yaml_and_a_repository_stays(tmp_path):
    (tmp_path / "weights").mkdir()
    for written, resolved in {
        "weights": str(tmp_path / "weights"),
        "./missing": str(tmp_path / "missing"),
        "openai-community/gpt2": "openai-community/gpt2",
    }.items():
        write_spec(tmp_path, EXPERIMENT.replace("{tokens", f"{{init_from: {written}, tokens"))
        assert load_experiment(tmp_path / "e.yaml").training.init_from == resolved


def test_a_level_finds_its_folder_from_another_working_folder(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    write_spec(tmp_path, EXPERIMENT)
    path = write_spec(tmp_path, SWEEP.replace("{heads: mha, start: scratch}", "weights"), "s.yaml")
    monkeypatch.chdir(os.sep)
    sources = {c.experiment.training.init_from for c in load_sweep(path).cells()}
    assert sources == {None, str(tmp_path / "weights")}
