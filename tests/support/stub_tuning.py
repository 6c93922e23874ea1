"""A sweep that tunes its rate over known surfaces of the loss, with stub trials."""

import math

from kvlab.errors import Diverged
from tests.support.stub_trials import SWEEP, StubRun, StubTrainable

TUNED = SWEEP + "tune: {training.learning_rate: [1e-3, 2e-3, 4e-3], seeds: [100, 101]}\n"

SURFACES = {2: {"best": 1.7e-3}, 1: {"best": 9e-3}}
"""By ``n_kv_head``; the second one's best is two steps above the grid."""


class SurfaceTrainable(StubTrainable):
    """A trainable whose loss is a surface in the rate: best at ``best``, diverging above ``cliff``.

    ``script`` gives the surfaces, `SURFACES` if it is empty.
    """

    def train(self, directory, should_stop, fence):
        if self.rate > self.surface["cliff"]:
            raise Diverged("loss is nan at step 1")
        super().train(directory, should_stop, fence)

    @property
    def surface(self):
        heads = self.trial.experiment.model.n_kv_head
        return {"cliff": math.inf, "steep": 1.0, **(self.script or SURFACES)[heads]}

    @property
    def rate(self):
        return self.trial.experiment.training.learning_rate

    def act(self, kind, step):
        pass

    def loss(self, _drawn):
        away = math.log(self.rate / self.surface["best"])
        bend = 0.05 * (self.surface["steep"] if away > 0 else 1.0)
        return 4.0 + self.trial.seed / 100 + bend * away**2


class SurfaceRun(StubRun):
    trainable = SurfaceTrainable
