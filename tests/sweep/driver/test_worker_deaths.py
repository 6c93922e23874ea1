"""The driver on a fake cluster whose processes die at any moment."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import WorkerKilled
from kvlab.store import Store
from kvlab.sweep import Driver
from kvlab.sweep.executors.executor import EndedTask
from tests.support.stub_trials import SWEEP, StubRun, tiny_plan


class RoughExecutor:
    """A fake cluster with several slots, where trials end in any order and die at any time."""

    def __init__(self, run, slots, chance, seed):
        self.run, self.slots, self.chance = run, slots, chance
        self.random = random.Random(seed)
        self.trials = []
        self.starts = Counter()

    def describe(self):
        return "rough"

    def check_requests(self, requests):
        pass

    def has_room(self, resources):  # noqa: ARG002
        return len(self.trials) < self.slots

    def start(self, trial):
        assert trial.id not in {t.id for t in self.trials}, "started twice at once"
        busy = {t.training_id for t in self.trials}
        done = (
            Store(self.run.store).training_directory(trial.training_id) / "training.json"
        ).exists()
        assert done or trial.training_id not in busy, "two trials would train the same"
        self.starts[trial.id] += 1
        self.trials.append(trial)

    def wait(self, seconds):  # noqa: ARG002
        if not self.trials:
            return []
        trial = self.trials.pop(self.random.randrange(len(self.trials)))
        killed = EndedTask(trial.id, error=WorkerKilled("its process died"))
        if self.random.random() < self.chance / 2:
            return [killed]  # before it did anything
        outcome = self.run(trial)
        if self.random.random() < self.chance / 2:
            return [killed]  # after it had recorded its result
        return [EndedTask(trial.id, outcome=outcome)]

    def close(self, *, force=False):
        pass


@settings(max_examples=25)
@given(
    slots=st.integers(1, 4),
    chance=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 10**6),
    bugs=st.sets(st.integers(0, 7), max_size=3),
)
def test_whatever_dies_every_trial_is_recorded_exactly_once(
    tmp_path_factory, slots, chance, seed, bugs
):
    folder = tmp_path_factory.mktemp("rough")
    store = Store(folder / "runs")
    planned = tiny_plan(folder, text=SWEEP + "failures: {same_error: 0, backoff_seconds: 0}\n")
    trials = [one.trial.id for one in planned.trials]
    script = {(trials[index], "measure", 0): "bug" for index in bugs}
    run = StubRun(store.path, script=script)
    executor = RoughExecutor(run, slots, chance, seed)
    recorded = []
    summary = Driver(planned, store, executor, on_result=recorded.append).run()
    assert sorted(recorded) == sorted(trials)
    assert summary.states["missing"] == 0
    for index, trial in enumerate(trials):
        result = store.result(trial)
        kinds = {None if result["error"] is None else result["error"]["class"]}
        assert kinds <= ({"bug", "killed"} if index in bugs else {None, "killed"})
        assert executor.starts[trial] <= 4
        if kinds == {"killed"}:
            assert executor.starts[trial] == 4
    assert chance or summary.states["failed"] == len(bugs)
