import math

import pytest

from kvlab.train.optimizer import learning_rate
from tests.support.tiny_training import experiment


def rates(**training):
    t = experiment(training={"tokens": 64 * 110, "warmup_tokens": 64 * 10, **training}).training
    return [learning_rate(t, step) for step in range(t.steps)]


def test_cosine_is_half_a_cosine_after_warm_up():
    schedule_rates = rates(final_learning_rate=1e-3)
    assert schedule_rates[:10] == pytest.approx([1e-3 * (i + 1) for i in range(10)])
    assert schedule_rates[10] == pytest.approx(1e-2)
    assert schedule_rates[60] == pytest.approx((1e-2 + 1e-3) / 2)
    assert schedule_rates[35] == pytest.approx(1e-3 + 9e-3 * (0.5 + math.sqrt(2) / 4))
    assert 1e-3 < schedule_rates[-1] < 1.01e-3
    assert sorted(schedule_rates[9:], reverse=True) == schedule_rates[9:]


def test_wsd_is_flat_until_its_decay():
    schedule_rates = rates(schedule="wsd", decay_tokens=64 * 40, final_learning_rate=1e-3)
    assert schedule_rates[:10] == pytest.approx([1e-3 * (i + 1) for i in range(10)])
    assert schedule_rates[10:71] == pytest.approx([1e-2] * 61)
    assert schedule_rates[80] == pytest.approx(1e-3 + 9e-3 * 0.5), "a quarter of the decay"
    assert schedule_rates[-1] == pytest.approx(1e-3 + 9e-3 * (1 - math.sqrt(39 / 40)))
    assert sorted(schedule_rates[70:], reverse=True) == schedule_rates[70:]
    schedule_rates = rates(schedule="wsd")  # decays over a fifth by default
    assert [i for i, rate in enumerate(schedule_rates) if rate == 1e-2] == list(range(9, 89))
