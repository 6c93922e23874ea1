"""The order in which trials start, and what they wait for."""

import pytest

from kvlab.errors import ResourceError
from kvlab.spec import load_sweep
from kvlab.sweep import Driver, plan
from kvlab.sweep.driver.trial_queue import TrainingWaitlist, order_trials
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support import stub_trials as stub
from tests.support.extensions import needs
from tests.support.stub_search import SEARCH, searching
from tests.support.stub_trials import StubRun, identify, tiny_plan, write_sweep


class Crowded(InlineExecutor):
    """An executor that has no room at the first three calls."""

    refusals = 3

    def has_room(self, resources):
        self.refusals -= 1
        return self.refusals < 0 and super().has_room(resources)


def test_a_driver_waits_for_room_and_says_so_once(store, planned):
    told = []
    driver = Driver(planned, store, Crowded(StubRun(store.path)), on_event=told.append)
    assert driver.run().states["done"] == 8
    waiting = [event.message for event in told if event.kind == "waiting"]
    assert waiting == ["its resources are in use by others; it starts when there is room"]


def test_what_waits_for_a_machine_that_left_can_be_stopped(store, planned):
    class Shrunk(Crowded):
        refusals = 10**9
        has = True

        def check_requests(self, requests):  # noqa: ARG002 (the contract's)
            if not self.has:
                raise ResourceError("resources.cpus = 1, and no machine here has more than 0")
            self.has = False

    told = []

    def tell(event):
        told.append(event)
        driver.stop()

    driver = Driver(planned, store, Shrunk(StubRun(store.path)), on_event=tell)
    assert driver.run().exit_code == 130
    assert [event.kind for event in told] == ["waiting"]
    assert told[0].message.startswith("resources.cpus = 1, and no machine here has more than 0;")


@needs("search")
def test_a_search_is_refused_before_it_starts_though_its_base_is_done(tmp_path, monkeypatch, store):
    base = plan(load_sweep(write_sweep(tmp_path, SEARCH)), store, identify=identify)
    StubRun(store.path)(base.trials[0].trial)
    monkeypatch.setattr(stub, "EXPERIMENT", stub.EXPERIMENT + "resources: {cpus: 4000}\n")
    _, search, driver = searching(tmp_path)
    assert search.plan.trials[0].state == "done"
    with pytest.raises(ResourceError, match="resources.cpus = 4000 and"):
        driver.run()
    assert store.trial_ids() == [base.trials[0].trial.id]
    assert not store.stop_flag("s").exists()


THREE_FACTORS = """\
question: What does it cost?
experiment: e.yaml
factors:
  rate:
    low: {}
    mid: {training.learning_rate: 1e-3}
    high: {training.learning_rate: 2e-3}
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  serving:
    plain: {}
    tied: {serving.tie: "adjacent:2"}
    int8: {serving.kv_dtype: int8}
seeds: [0, 1, 2, 3]
"""


def test_the_baseline_then_every_architecture_then_a_shuffle(tmp_path):
    planned = tiny_plan(tmp_path, text=THREE_FACTORS).trials
    ordered = order_trials(planned)
    assert sorted(p.trial.id for p in ordered) == sorted(p.trial.id for p in planned)
    assert ordered[0] == planned[0]
    early = [(p.levels["heads"], p.levels["serving"]) for p in ordered[:6]]
    assert len(set(early)) == 6
    rates = [p.levels["rate"] for p in ordered[6:]]
    assert rates != sorted(rates, key=["low", "mid", "high"].index)
    # early results are representative: no level is left to the end
    assert {p.levels["rate"] for p in ordered[6:26]} == {"low", "mid", "high"}
    seen = set()
    for one in ordered:
        assert one.shares_with is None or one.shares_with in seen, "who trains comes first"
        seen.add(one.trial.id)


def test_who_shares_a_training_starts_when_it_is_done_though_its_trial_goes_on(planned, store):
    first, other = planned.trials[0], planned.trials[2]
    training, waitlist = first.trial.training_id, TrainingWaitlist()
    waitlist.begin(training, first.trial)
    waitlist.wait_for(training, other)
    assert (waitlist.is_running(training), waitlist.pop_trained(store)) == (True, [])
    StubRun(store.path)(first.trial)
    assert (waitlist.pop_trained(store), waitlist.end(first)) == ([other], [])
    assert not waitlist.is_running(training)
