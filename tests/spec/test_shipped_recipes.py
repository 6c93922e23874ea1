"""The experiments that ship follow the rules that experiments/README.md states."""

import math
from pathlib import Path

import pytest

from kvlab.layout import parameter_count
from kvlab.spec import load_experiment

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("size", [10, 30, 60])
def test_smaller_sizes_follow_the_rule(size):
    of = load_experiment(FOLDER / f"gpt2-{size}m.yaml")
    training, parameters = of.training, parameter_count(of.model)
    assert abs(parameters / 1e6 - size) < 0.1 * size
    assert 0 <= 20 * parameters - training.tokens < training.batch_tokens
    assert training.tokens == training.steps * training.batch_tokens
    rate = 0.003239 - 0.0001395 * math.log(parameters)
    assert training.learning_rate == float(f"{rate:.0e}")
    assert 3000 <= training.steps <= 5000
    assert math.log2(training.batch_tokens).is_integer()
    assert of.data.max_tokens * (1 - of.data.validation_fraction) > training.tokens
    text = (FOLDER / "README.md").read_text()
    row = f"| {size}M | {parameters:,} | {training.steps:,} x {training.batch_tokens:,}"
    assert row in text


def test_gpt2_124m_is_the_published_recipe():
    for name, steps in (("gpt2-124m", 19_073), ("gpt2-124m-30b", 57_220)):
        of = load_experiment(FOLDER / f"{name}.yaml")
        t = of.training
        assert (t.steps, t.batch_tokens, t.warmup_tokens) == (steps, 524_288, 715 * 524_288)
        assert (t.learning_rate, t.final_learning_rate, t.schedule) == (6e-4, 6e-5, "cosine")
        assert (t.beta1, t.beta2, t.weight_decay, t.clip) == (0.9, 0.95, 0.1, 1.0)
        assert (t.precision, t.compile, of.model.vocab_size % 128) == ("bfloat16", True, 0)


@pytest.mark.parametrize("name", ["gpt2-10m", "gpt2-30m", "gpt2-60m", "gpt2-124m", "gpt2-124m-30b"])
def test_held_out_text_suffices_however_the_documents_fall(name):
    """The split is by document. FineWeb-Edu's have about 1,000 tokens, and spread about twice
    that, so the sum of n of them lies within 5 x 2,000 x sqrt(n) of its mean."""
    of = load_experiment(FOLDER / f"{name}.yaml")
    mean = (of.data.max_tokens or 9.9e9) * of.data.validation_fraction
    least = mean - 5 * 2000 * math.sqrt(mean / 1000)
    needed = (of.evaluation.loss_tokens, of.evaluation.served_tokens, of.training.evaluate_tokens)
    assert least > max(needed) + of.model.block_size
