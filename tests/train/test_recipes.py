"""Parts of a recipe: the schedule, what counts as diverged, masked documents."""

import math

import numpy as np
import pytest
import torch

from kvlab.data.batches import get_training_batch
from kvlab.errors import Diverged
from kvlab.train.train_step import WINDOW, TrainStepper, check_spike, learning_rate
from tests.support.tiny_training import dataset, experiment, model


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


TRAINING = experiment(training={"spike": 0.5}).training


def fed(losses, training=TRAINING):
    """The step at which the losses count as diverged, or None."""
    lowest = None
    for step in range(len(losses)):
        try:
            lowest = check_spike(losses[: step + 1], lowest, training, step)
        except Diverged:
            return step
    return None


def test_a_spike_that_lasts_has_diverged():
    falling = [5 - 0.02 * i for i in range(100)]  # the last 32 have the mean 3.33
    assert fed(falling + [6.0] * 40) == 106
    means = [(sum(falling[-25 - i :]) + (7 - i) * 6.0) / 32 for i in (0, 1)]
    assert means[0] > 3.33 + 0.5 > means[1], "by hand"


def test_a_spike_that_passes_or_is_allowed_has_not():
    falling = [5 - 0.02 * i for i in range(100)]
    assert fed([*falling, 6.0, 6.0, 5.0, *falling[80:]]) is None
    assert fed(falling[::-1][:WINDOW]) is None, "nothing to compare with yet"
    training = experiment(training={"spike": None}).training
    assert fed([1.0] * 40 + [9.0] * 40, training) is None


DOCUMENTS = dataset()
DOCUMENTS.train[::11] = 256
PLAIN = experiment()
MASKED = PLAIN.model_copy(
    update={"data": PLAIN.data.model_copy(update={"mask_documents": True})}
)  # fmt: skip


@pytest.mark.usefixtures("code_path")
def test_the_loss_of_a_step_is_the_mean_over_documents_alone():
    stepper = TrainStepper(model(MASKED), DOCUMENTS, MASKED, seed=0)
    reference, losses = model(MASKED), []
    x, y = get_training_batch(DOCUMENTS.train, seed=0, step=0, batch_size=4, block_size=16)
    for tokens, targets in zip(x, y, strict=True):
        document = []
        for token, target in zip(tokens, targets, strict=True):
            document = [int(token)] if token == 256 else [*document, int(token)]
            logits = reference(torch.tensor([document]))[0, -1].detach().log_softmax(-1)
            losses.append(-float(logits[int(target)]))
    assert stepper.step(0) == pytest.approx(np.mean(losses), abs=1e-5)
