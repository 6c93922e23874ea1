"""The experiments that ship follow the rules that experiments/README.md states."""

import math
from pathlib import Path

import pytest

from kvlab.layout import parameter_count
from kvlab.spec import load_experiment
from tests.support.extensions import needs

pytestmark = needs("fineweb_edu")
FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("size", [10, 30, 60])
def test_smaller_sizes_follow_the_rule(size):
    experiment = load_experiment(FOLDER / f"gpt2-{size}m.yaml")
    training, parameters = experiment.training, parameter_count(experiment.model)
    assert abs(parameters / 1e6 - size) < 0.1 * size
    assert 0 <= 20 * parameters - training.tokens < training.batch_tokens
    assert training.tokens == training.steps * training.batch_tokens
    rate = 0.003239 - 0.0001395 * math.log(parameters)
    assert training.learning_rate == float(f"{rate:.0e}")
    assert 3000 <= training.steps <= 5000
    assert math.log2(training.batch_tokens).is_integer()
    data = experiment.data
    assert data.max_tokens * (1 - data.validation_fraction) > training.tokens
    text = (FOLDER / "README.md").read_text()
    row = f"| {size}M | {parameters:,} | {training.steps:,} x {training.batch_tokens:,}"
    assert row in text


def test_gpt2_124m_is_the_published_recipe():
    for name, steps in (("gpt2-124m", 19_073), ("gpt2-124m-30b", 57_220)):
        experiment = load_experiment(FOLDER / f"{name}.yaml")
        t = experiment.training
        assert (t.steps, t.batch_tokens, t.warmup_tokens) == (steps, 524_288, 715 * 524_288)
        assert (t.learning_rate, t.final_learning_rate, t.schedule) == (6e-4, 6e-5, "cosine")
        assert (t.beta1, t.beta2, t.weight_decay, t.clip) == (0.9, 0.95, 0.1, 1.0)
        assert (t.precision, t.compile, experiment.model.vocab_size % 128) == ("bfloat16", True, 0)
