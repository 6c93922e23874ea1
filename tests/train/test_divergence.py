from kvlab.errors import Diverged
from kvlab.train.train_step import WINDOW, check_spike
from tests.support.tiny_training import experiment

TRAINING = experiment(training={"spike": 0.5}).training


def fed(losses, training=TRAINING):
    """The step at which the losses count as diverged, or None."""
    lowest = None
    for step in range(len(losses)):
        recent = losses[max(0, step + 1 - WINDOW) : step + 1]
        try:
            lowest = check_spike(recent, lowest, training, step)
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
