"""Experiments: defaults, presets, and errors with place, value, rule and hint."""

import pytest

from kvlab.errors import SpecError
from kvlab.spec import ModelConfig, load_experiment, load_served_model, parse_override
from tests.support.spec_files import EXPERIMENT, experiment_errors, write_spec


def test_a_good_file_is_filled_in(tmp_path):
    experiment = load_experiment(write_spec(tmp_path, EXPERIMENT))
    assert experiment.training.steps == 39
    assert experiment.training.final_learning_rate == pytest.approx(6e-5)
    assert (experiment.model.n_kv_head, experiment.model.head_dim) == (4, 16)
    assert experiment.model.ffn_dim == 256


def test_keys_beside_a_preset_win():
    model = ModelConfig(preset="llama-7b", n_kv_head=8)
    assert (model.n_layer, model.n_kv_head, model.ffn_dim) == (32, 8, 11008)
    assert ModelConfig(mlp="swiglu", n_embd=768).ffn_dim == 2048


def test_a_default_that_follows_a_wrong_value_is_no_second_problem(tmp_path):
    text = EXPERIMENT.replace("n_head: 4", "n_head: four").replace("10e3", "many")
    assert [line.split(" ")[1] for line in experiment_errors(tmp_path, text)] == [
        "model.n_head",
        "training.tokens",
    ]


def test_null_stands_for_the_default_of_what_follows_from_other_values(tmp_path):
    written = "final_learning_rate: null, warmup_tokens: null, schedule: wsd, decay_tokens: null"
    text = EXPERIMENT.replace("tokens: 10e3", f"tokens: 10e3, {written}")
    training = load_experiment(write_spec(tmp_path, text)).training
    assert training.final_learning_rate == 6e-5
    assert (training.warmup_tokens, training.decay_tokens) == (400, 2000)


def test_several_problems_come_together_sorted(tmp_path):
    text = EXPERIMENT.replace("n_layer: 6", "n_layer: x").replace("batch_tokens", "batchtokens")
    lines = experiment_errors(tmp_path, text)
    assert [line.split(":")[1] for line in lines] == ["2", "4"]
    assert "did you mean batch_tokens?" in lines[1]


def test_a_missing_section_is_named(tmp_path):
    assert experiment_errors(tmp_path, "name: x\n") == ["e.yaml:1:1: model is missing; add it"]


def test_overrides_are_checked_and_named(tmp_path):
    path = write_spec(tmp_path, EXPERIMENT)
    assert load_experiment(path, {"model.n_kv_head": 1}).model.n_kv_head == 1
    with pytest.raises(SpecError, match=r"^model.n_kv_head=3: model.n_kv_head = 3 does not"):
        load_experiment(path, {"model.n_kv_head": 3})
    with pytest.raises(SpecError, match="did you mean n_head"):
        load_experiment(path, {"model.n_heads": 3})
    assert parse_override("model.kv_sharing=[[0, 1]]") == ("model.kv_sharing", [[0, 1]])
    with pytest.raises(SpecError, match="is not key=value"):
        parse_override("model.n_head")


def test_shapes_of_presets():
    assert load_served_model("gpt2").model.n_layer == 12
    with pytest.raises(SpecError, match="gpt4: is not a preset or a .yaml file"):
        load_served_model("gpt4")


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    text = EXPERIMENT.replace(
        "{tokenizer: bytes}", "{tokenizer: bytes, source: files, paths: [a.txt]}"
    )
    experiment = load_experiment(write_spec(tmp_path, text))
    assert experiment.data.paths == (str(tmp_path / "a.txt"),)
    assert "paths" not in experiment.data.identity()


def test_specs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ModelConfig().n_layer = 3
