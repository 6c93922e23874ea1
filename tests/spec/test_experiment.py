"""Experiments: defaults, presets, and errors with place, value, rule and hint."""

import pytest
from pydantic import ValidationError

from kvlab.errors import SpecError
from kvlab.spec import (
    Experiment,
    ModelConfig,
    ResourcesConfig,
    TrainingConfig,
    load_experiment,
    parse_overrides,
)
from tests.support.spec_files import EXPERIMENT, write_spec


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


def test_null_stands_for_the_default_of_what_follows_from_other_values():
    given = {"final_learning_rate": None, "warmup_tokens": None, "decay_tokens": None}
    training = TrainingConfig(tokens=10_000, schedule="wsd", **given)
    assert training.final_learning_rate == 6e-5
    assert (training.warmup_tokens, training.decay_tokens) == (400, 2000)


def test_overrides_are_checked_and_named(tmp_path):
    path = write_spec(tmp_path, EXPERIMENT)
    assert load_experiment(path, {"model.n_kv_head": 1}).model.n_kv_head == 1
    with pytest.raises(SpecError, match=r"^model.n_kv_head=3: model.n_kv_head = 3 does not"):
        load_experiment(path, {"model.n_kv_head": 3})
    assert parse_overrides(["model.kv_sharing=[[0, 1]]"]) == {"model.kv_sharing": [[0, 1]]}
    with pytest.raises(SpecError, match="is not key=value"):
        parse_overrides(["model.n_head"])
    with pytest.raises(SpecError, match=r"model.n_head=2 sets model.n_head a second time"):
        parse_overrides(["model.n_head=1", "model.n_head=2"])


def test_a_text_that_is_too_long_says_how_long_it_may_be(tmp_path):
    with pytest.raises(SpecError, match=r"\.\.\. is too long; write at most 500 characters"):
        load_experiment(write_spec(tmp_path, EXPERIMENT), {"data.licence": "x" * 501})


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    text = EXPERIMENT.replace(
        "{tokenizer: bytes}", "{tokenizer: bytes, source: files, paths: [a.txt]}"
    )
    experiment = load_experiment(write_spec(tmp_path, text))
    assert experiment.data.paths == (str(tmp_path / "a.txt"),)
    assert "paths" not in experiment.data.identity()


@pytest.mark.parametrize(
    ("resources", "workers"),
    [({"cpus": 2.0}, 1), ({"gpus": 0.5}, 1), ({"gpus": 4.0}, 4), ({"workers": 3}, 3)],
)
def test_workers_default_to_one_per_whole_gpu(resources, workers):
    assert ResourcesConfig(**resources).training_workers == workers


@pytest.mark.parametrize(
    ("resources", "own"),
    [
        ({"cpus": 8.0, "gpus": 4.0, "accelerator_type": "H100"}, (2.0, 1.0, "H100")),
        ({"cpus": 3.0, "workers": 2}, (1.5, 0.0, None)),
        ({"cpus": 2.0, "gpus": 0.25}, (2.0, 0.25, None)),
    ],
)
def test_one_worker_has_its_part_of_the_resources(resources, own):
    one = ResourcesConfig(**resources).one_worker
    assert (one.cpus, one.gpus, one.accelerator_type, one.training_workers) == (*own, 1)


def test_a_kind_of_gpu_without_a_gpu_is_refused():
    with pytest.raises(ValidationError, match="is a kind of GPU, and gpus is 0"):
        ResourcesConfig(accelerator_type="H100")


def test_more_items_than_hellaswag_has_are_refused_before_anything_is_trained(tmp_path):
    path = write_spec(tmp_path, EXPERIMENT)
    assert load_experiment(path, {"evaluation.hellaswag": 10_042}).evaluation.hellaswag == 10_042
    with pytest.raises(SpecError, match=r"hellaswag = 10043 is not .* a number of at most 10042"):
        load_experiment(path, {"evaluation.hellaswag": 10_043})


@pytest.mark.parametrize(
    ("block_size", "written", "prompt", "new"),
    [(64, {}, 32, 32), (63, {}, 32, 31), (80, {}, 48, 32), (96, {}, 64, 32), (1024, {}, 64, 32),
     (64, {"prompt_tokens": 60}, 60, 4), (64, {"new_tokens": 60}, 4, 60), (2, {}, 1, 1)],
)  # fmt: skip
def test_defaults_fit_the_model(block_size, written, prompt, new):
    data = {"name": "e", "model": {"block_size": block_size}, "benchmark": written}
    experiment = Experiment.model_validate(data)
    benchmark = experiment.benchmark
    assert (benchmark.prompt_tokens, benchmark.new_tokens) == (prompt, new)
    assert 0 <= 8192 - experiment.training.batch_tokens < block_size
    assert experiment.training.batch_tokens % block_size == 0


def test_what_is_read_is_read_again_from_a_record():
    """A record writes every field, those too that go with other values alone."""
    rope = {"position": "rope", "rope_scaling": {"by": "linear", "factor": 2}}
    model = ModelConfig(n_layer=2, n_head=2, n_embd=16, **rope)
    assert ModelConfig.model_validate_json(model.model_dump_json()) == model
