"""Sweeps with looks over known differences, and with tuning over known surfaces of the loss, with
stub trials."""

import itertools
import math
import random

import pytest

from kvlab.errors import Diverged
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver
from kvlab.sweep.driver.driver import run_stages
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_stage
from kvlab.sweep.planning.stages import plan_stage
from tests.support.extensions import find_missing
from tests.support.stub_trials import SWEEP, StubRun, StubTrainable, identify, write_sweep

LOOKS = """\
question: Which of them costs something?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  position:
    learned: {}
    rope: {model.position: rope}
design: one_factor
seeds: {looks: [3, 5, 7]}
"""
"""mqa costs 0.3 and rope nothing, over a noise of 0.01: mqa is decided at the second look, and rope
is not decided at all."""


class KnownLoss(StubTrainable):
    """A loss that depends on the cell and on noise of each training."""

    def loss(self, _drawn):
        model, seed = self.trial.experiment.model, self.trial.seed
        # of the cell and the seed, not of ids, which change with what they are made of
        name = f"9 {model.n_kv_head} {model.position} {seed}"
        noise = random.Random(name).gauss(0.0, 0.01)
        return 5.0 + 0.3 * (model.n_kv_head == 1) + noise + random.Random(seed).gauss(0.0, 0.1)


class KnownRun(StubRun):
    trainable = KnownLoss


def load_looks(folder, text=LOOKS):
    for key, extension in (("looks:", "looks"), ("tune:", "tuning")):
        if key in text and find_missing(extension):
            pytest.skip(f"without {extension}")
    return load_sweep(write_sweep(folder, text))


def drive_looks(
    sweep, store, *, run=KnownRun, lines=None, on_stage=None, on_plan=None, stop_at=0, **options
):
    """Run all stages of a sweep on the inline executor; return the summary.

    Args:
        run: Class of the stub run.
        lines: Receives what was decided.
        on_plan: Called with every stage.
        on_stage: Called with every stage that has trials to run, before it runs them.
        stop_at: Number of the event at which the driver is asked to stop.
        options: Arguments of the stub trainable.
    """

    events = itertools.count(1)

    def next_stage():
        stage = plan_stage(sweep, store, identify=identify)
        if lines is not None:
            lines.extend(stage.lines)
        return stage

    def run_stage(stage):
        if on_plan is not None:
            on_plan(stage)
        executor = InlineExecutor(run(store.path, **options))
        description = describe_stage(stage, yaml="", experiment_yaml="", command="")
        prepare = None if on_stage is None else lambda missing, _: (on_stage(stage), missing)[1]
        driver = Driver(
            stage.plan, store, executor, description=description, prepare=prepare,
            on_event=lambda _: driver.stop() if next(events) == stop_at else None,
        )  # fmt: skip
        return driver.run()

    return run_stages(next_stage(), run_stage, next_stage)


def read_decisions(store: Store):
    """Return the seeds of every cell and the looks of a sweep, as recorded."""
    sweep = store.sweep("s")
    seeds = {" ".join(cell["levels"].values()): len(cell["trials"]) for cell in sweep["cells"]}
    return seeds, sweep["looks"]["taken"]


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
