"""Searches through the real driver: suggestions, limits, budgets, and resuming after a stop."""

import itertools
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest

from kvlab.errors import SpecError, StoreError
from kvlab.extensions.search.pruner import count_remaining_suggestions
from tests.support.stub_search import PRUNED, SEARCH, Bowl, RisingRun, find_best, history, searching


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Return the folder, store, search and summary of a search that was driven to its end."""
    folder = tmp_path_factory.mktemp("searched")
    store, search, driver = searching(folder)
    return folder, store, search, driver.run()


def test_the_best_is_found_and_everything_is_in_the_record(searched):
    _, store, search, summary = searched
    assert (summary.exit_code, summary.states["done"]) == (0, 13)
    assert search.stop_reason == "12 trials are the budget"
    best = find_best(store, search)[0]
    assert best.observation.values[0] < 0.3
    assert best.observation.values[0] == min(
        p.observation.values[0] for p in search.suggestions if p.observation.values
    )
    sweep = store.sweep("s")
    assert len(sweep["cells"]) == 13
    assert sweep["patches"]["point"][best.level] == best.patch
    assert all(store.status(t) == "done" for c in sweep["cells"] for t in c["trials"].values())


def test_what_is_impossible_or_breaks_a_known_limit_is_never_trained(tmp_path):
    text = SEARCH.replace("trials: 12", "trials: 6\n  limits: {kv_bytes_per_token: {at_most: 64}}")
    store, search, driver = searching(tmp_path, text.replace("[1, 2]", "[1, 2, 3]"))
    assert driver.run().exit_code == 0
    impossible = [p for p in search.suggestions if p.skip_reason.startswith("is not possible")]
    assert "model.n_kv_head = 3 does not divide n_head = 2" in impossible[0].skip_reason
    beyond = [p for p in search.suggestions if p.skip_reason == "is beyond a limit"]
    assert beyond
    assert all(p.patch["model.n_kv_head"] == 2 and not p.trial_id for p in beyond)
    assert sum(p.has_trial for p in search.suggestions) == 6
    assert len(store.trial_ids()) == 7


def test_a_trial_without_a_limited_number_does_not_keep_the_limit(tmp_path):
    text = SEARCH.replace("trials: 12", "trials: 2\n  limits: {loss_beyond: {at_most: 9}}")
    _, search, driver = searching(tmp_path, text)
    driver.run()
    assert {p.observation.state for p in search.suggestions if p.has_trial} == {"lost"}


def test_a_small_space_ends_when_nothing_new_is_suggested(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.extensions.search.searcher.MAX_FRUITLESS_SUGGESTIONS", 12)
    text = SEARCH.replace(
        "  ranges:\n    training.learning_rate: {low: 1e-4, high: 1e-1, log: true}\n", ""
    )
    text = text.replace("trials: 12", "trials: 12\n  sampler: random")
    store, search, driver = searching(tmp_path, text)
    assert driver.run().exit_code == 0
    reason = "the last 12 suggestions led to nothing new; the last one computes the same as "
    assert search.stop_reason.startswith(reason)
    assert sum(p.has_trial for p in search.suggestions) == 2
    assert len(store.trial_ids()) == 2  # n_kv_head = 2 is the base experiment


@pytest.mark.parametrize(
    ("limits", "place", "message"),
    [
        ("{kv_bytes_per_token: {at_most: 64}, parameters: {at_most: 9}}", "11:69",
         "parameters.at_most = 9 is kept by none of 8 suggestions; the closest has 3,736 (n_kv"),
        ("{kv_bytes: {at_least: 1e6, at_most: 2e6}}", "11:33",
         "kv_bytes.at_least = 1,000,000 is kept by none of 8 suggestions; the closest has 1,024 ("),
    ],
)  # fmt: skip
def test_a_limit_that_nothing_keeps_is_refused_before_anything_trains(
    tmp_path, monkeypatch, limits, place, message
):
    monkeypatch.setattr("kvlab.extensions.search.searcher.MAX_FRUITLESS_SUGGESTIONS", 8)
    text = f"{SEARCH}  limits: "
    with pytest.raises(SpecError) as error:
        searching(tmp_path, text + limits)[2].run()
    assert str(error.value).startswith(f"{tmp_path}/s.yaml:{place}: search.limits.{message}")
    store, search, driver = searching(tmp_path, text + "{parameters: {at_most: 1e6}}")
    assert not store.trial_ids()
    assert driver.run().states["done"] == 13, "it began anew"
    assert len(history(store)) == len(search.suggestions)


@pytest.fixture
def clock(monkeypatch):
    """Replace the search's clock: 100 seconds pass in every measurement, and none otherwise."""
    passed = [0.0]

    def slow(self, *arguments, measure=Bowl.measure):
        passed[0] += 100.0
        return measure(self, *arguments)

    monkeypatch.setattr(
        "kvlab.extensions.search.searcher.time", SimpleNamespace(monotonic=lambda: passed[0])
    )
    monkeypatch.setattr(Bowl, "measure", slow)
    return passed


HOURS = SEARCH.replace("trials: 12", "hours: 0.1")  # 360 seconds


def test_hours_end_it_counted_over_all_runs_and_not_between_them(tmp_path, clock):
    calm, search, driver = searching(tmp_path / "calm", HOURS)
    assert driver.run().exit_code == 0
    assert clock == [400.0]  # the base and three more; the fourth began at 300
    assert [calm.status(trial) for trial in calm.trial_ids()] == ["done"] * 4
    assert search.stop_reason == "0.1 hours are over"
    rough, _, driver = searching(tmp_path / "rough", HOURS, stop_at=4)  # at the end of the second
    assert driver.run().stopped
    clock[0] += 10**6
    rough, search, driver = searching(tmp_path / "rough", HOURS)
    driver.run()
    assert search.seconds == 400.0
    assert searching(tmp_path / "rough", HOURS)[2].run().trials_run == 0
    assert history(rough) == history(calm)


def test_several_objectives_give_a_front_and_several_in_flight_are_all_different(tmp_path):
    text = SEARCH.replace("objectives: [loss]", "objectives: [loss, kv_bytes]\n  parallel: 4")
    _, search, _ = searching(tmp_path / "a", text)
    suggested = [search.ask() for _ in range(5)]
    assert suggested[4] is None
    assert len({one.trial.id for one in suggested[:4]}) == 4
    store, search, driver = searching(tmp_path / "b", text)
    driver.run()
    front = sorted(p.observation.values for p in find_best(store, search))
    assert {kv for _, kv in front} == {p.observation.values[1] for p in search.suggestions}
    assert all(one[1] > other[1] for one, other in itertools.pairwise(front))


def remaining(folder, text=SEARCH):
    store, search, _ = searching(folder, text)
    return count_remaining_suggestions(search.plan, store)


def test_a_search_counts_as_many_suggestions_as_its_budgets_allow(tmp_path):
    one = searching(tmp_path)[1].plan.trials[0].flops
    text = SEARCH.replace("trials: 12", f"trials: 12\n  flops: {2.5 * one}")
    assert remaining(tmp_path / "b", text) == 3  # the third passes the budget
    assert remaining(tmp_path / "c", SEARCH.replace("trials: 12", "hours: 2")) == 0
    assert remaining(tmp_path) == 12
    _, search, driver = searching(tmp_path, stop_at=7)  # in the midst of the fourth trial
    driver.run()
    ended = sum(point.observation.state == "ok" for point in search.suggestions)
    assert 0 < ended < 12
    assert remaining(tmp_path) == 12 - ended


def test_a_pruned_suggestion_spends_what_it_was_trained(tmp_path):
    one = searching(tmp_path / "a", PRUNED)[1].plan.trials[0].flops
    text = PRUNED.replace("trials: 12", f"flops: {40 * one}")
    text = text.replace("  seed: 3", "  hours: 1\n  seed: 3")
    _, search, driver = searching(tmp_path / "b", text, run=RisingRun, stop_at=40)
    driver.run()
    states = Counter(point.observation.state for point in search.suggestions)
    assert states["pruned"] > states["open"]
    most = 40 - states["ok"]  # as if those that were pruned had cost nothing
    counted = remaining(tmp_path / "b", text) - states["open"]
    assert most - states["pruned"] / 2 < counted < most


def test_the_history_of_another_search_is_not_mixed_in(tmp_path, searched):
    shutil.copytree(searched[0], tmp_path, dirs_exist_ok=True)
    assert remaining(tmp_path) == 0
    with pytest.raises(StoreError, match="another search of this name"):
        searching(tmp_path, SEARCH.replace("seed: 3", "seed: 4"))
    longer = searching(tmp_path, SEARCH.replace("trials: 12", "trials: 14"))
    assert longer[2].run().trials_run == 2
