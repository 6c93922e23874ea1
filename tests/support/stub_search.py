"""A search over a known loss, with stub trials, and its history."""

import itertools
import math

import pytest

from kvlab.analysis.search_results import SearchResults
from kvlab.errors import Paused
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_stage
from kvlab.train.training_record import write_rung
from tests.support.stub_trials import StubRun, StubTrainable, identify, write_sweep

SEARCH = """\
question: Which learning rate?
experiment: e.yaml
search:
  ranges:
    training.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  choices:
    model.n_kv_head: [1, 2]
  objectives: [loss]
  trials: 12
  seed: 3
"""


STEPS = SEARCH.replace("log: true", "step: 0.02").replace("low: 1e-4", "low: 0.02")
"""A space of few points."""


class Bowl(StubTrainable):
    """A known loss: best at learning_rate 1e-2 with two K/V heads."""

    def loss(self, _drawn):
        return away(self.trial) + 0.1 * (2 - self.trial.experiment.model.n_kv_head)


class BowlRun(StubRun):
    trainable = Bowl


PRUNED = """\
question: Which learning rate?
experiment: e.yaml
search:
  ranges:
    training.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  objectives: [loss]
  pruning: {rule: halving, factor: 3}
  sampler: random
  trials: 12
  seed: 3
"""


def away(trial):
    """Return the distance of a learning rate from the best, which is the loss at every rung."""
    return (math.log10(trial.experiment.training.learning_rate) + 2) ** 2


class Rising(StubTrainable):
    """A stub that pauses at ``trial.until``."""

    def train(self, directory, should_stop, fence):
        until, checkpoint = self.trial.until, directory / "checkpoint"

        def pauses():
            step = int(checkpoint.read_text()) if checkpoint.exists() else 0
            return until is not None and step >= until

        def check():
            if pauses():
                raise Paused("at its rung")
            return should_stop()

        try:
            if not pauses():
                super().train(directory, check, fence)
                return
        except Paused:
            pass
        write_rung(directory, until, int(checkpoint.read_text()), away(self.trial) + 1.0)
        raise Paused("at its rung")

    def loss(self, _drawn):
        return away(self.trial)


class RisingRun(StubRun):
    trainable = Rising


def find_best(store, search):
    """Return the suggestions that no other one beats, by the record of a search."""
    by_level = {one.level: one for one in search.suggestions}
    results = SearchResults(store.sweep(search.plan.sweep.name)["search"])
    return [by_level[one.level] for one in results.best]


def searching(folder, text=SEARCH, *, run=BowlRun, stop_at=0, promote=(), on_event=None, **options):
    """Return the store, the search and its driver.

    Args:
        run: Class of the stub run.
        stop_at: Number of the event at which the driver is asked to stop.
        on_event: Called with every event of the driver.
        promote: Ids of pruned trials that are trained to the end.
        options: Arguments of the stub trainable.
    """
    searcher = pytest.importorskip("kvlab.extensions.search.searcher")
    folder.mkdir(exist_ok=True)
    store = Store(folder / "runs")
    sweep = load_sweep(write_sweep(folder, text))
    base = plan(sweep, store, identify=identify)

    def describe(stage):
        return describe_stage(stage, yaml=text, experiment_yaml="", command="kvlab submit")

    search = searcher.Searcher(base, store, describe, identify)
    for trial_id in promote:
        search.promote(trial_id)
    events = itertools.count(1)

    def handle(event):
        if on_event is not None:
            on_event(event)
        if next(events) == stop_at:
            driver.stop()

    driver = Driver(
        search.plan, store, InlineExecutor(run(store.path, **options)),
        description=describe(search.stage), source=search, on_event=handle,
    )  # fmt: skip
    return store, search, driver


def history(store):
    """Return the patch, state, values, rungs and trial of every suggestion."""
    points = store.search_points("s").read()
    return [
        (p["patch"], p["past"]["state"], p["past"]["values"], p["past"]["rungs"], p["trial"])
        for p in points
    ]
