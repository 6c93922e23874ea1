"""Pruning through the real driver: which trainings continue at a rung, and what is recorded."""

import random
import shutil
from functools import partial

import pytest

from kvlab.errors import RecordDamaged
from kvlab.extensions.search.history import Observation
from kvlab.extensions.search.optuna_sampler import objective_direction, suggest_params
from kvlab.spec import load_sweep
from kvlab.spec.search_config import PruningConfig, SearchConfig
from kvlab.store import Store
from kvlab.store.verification import heal, verify_record
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support import stub_search
from tests.support.driver_process import read_logged_steps
from tests.support.stub_search import RisingRun, away, find_best, history
from tests.support.stub_trials import identify, write_sweep

SEARCH = stub_search.PRUNED
searching = partial(stub_search.searching, text=SEARCH, run=RisingRun)


def steps_of(store, point):
    return read_logged_steps(store)[point.training_id]


def test_rungs_of_halving_divide_by_the_factor_and_those_of_median_double():
    halving = PruningConfig.model_validate({"rule": "halving", "factor": 4, "first": 0.05})
    assert halving.rungs == (1 / 16, 1 / 4)
    assert halving.steps(160) == (10, 40)
    assert PruningConfig.model_validate({"rule": "halving", "factor": 20}).rungs == (0.05,)
    assert PruningConfig.model_validate({"rule": "median"}).rungs == (0.1, 0.2, 0.4, 0.8)
    config = PruningConfig.model_validate({"rule": "median", "rungs": [0.5, 0.9]})
    assert config.steps(20) == (10, 18)
    assert config.steps(2) == (1,)  # a rung never stands at the end
    assert config.steps(0) == ()


def successive_halving(losses, factor, rungs):
    """Run asynchronous successive halving (algorithm 2 of Li et al., 2020), one training at a time.

    Returns:
        How many rungs each training has reached; one more if it was trained to the end.
    """
    reached = dict.fromkeys(losses, 0)
    begun: list[str] = []

    def top(rung, least):
        there = [one for one in begun if reached[one] > rung]
        return sorted(there, key=losses.get)[: max(least, len(there) // factor)]

    def run(one):
        while reached[one] <= rungs:
            reached[one] += 1
            if one not in top(reached[one] - 1, 0):
                return

    def promote(least):
        for rung in reversed(range(rungs)):
            for one in top(rung, least):
                if reached[one] == rung + 1:
                    run(one)
                    return True
        return False

    for one in losses:
        while promote(0):
            pass
        begun.append(one)
        run(one)
    while promote(1):
        pass
    return reached


@pytest.mark.parametrize(("seed", "trials", "factor"), [(4, 14, 3), (5, 9, 2)])
def test_halving_trains_each_as_far_as_the_published_rule_says(tmp_path, seed, trials, factor):
    text = SEARCH.replace("seed: 3", f"seed: {seed}").replace("factor: 3", f"factor: {factor}")
    text = text.replace("trials: 12", f"trials: {trials}")
    store, search, driver = searching(tmp_path, text=text)
    summary = driver.run()
    assert summary.exit_code == 0
    assert search.stop_reason == f"{trials} trials are the budget"
    losses = {p.trial_id: p.observation.rung_losses[0] for p in search.suggestions}
    rungs = PruningConfig(rule="halving", factor=factor).steps(20)
    expected = successive_halving(losses, factor, len(rungs))
    reached_rungs = {
        p.trial_id: len(p.observation.rung_losses) + (p.observation.state == "ok")
        for p in search.suggestions
    }
    assert reached_rungs == expected
    for point in search.suggestions:
        assert len(steps_of(store, point)) == [*rungs, 20][reached_rungs[point.trial_id] - 1]
        expected_status = "done" if reached_rungs[point.trial_id] > len(rungs) else "pruned"
        assert store.status(point.trial_id) == expected_status
    assert summary.states["pruned"] == [store.status(t) for t in losses].count("pruned") > 0
    assert find_best(store, search)[0].trial_id == min(losses, key=losses.get)


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """Return the folder, the store and the search of one that was driven to its end."""
    folder = tmp_path_factory.mktemp("halved")
    store, search, driver = searching(folder)
    driver.run()
    return folder, store, search


def test_no_step_is_trained_twice_and_a_pruned_trial_says_where_it_stands(halved):
    _, store, search = halved
    for point in search.suggestions:
        steps = steps_of(store, point)
        assert steps == list(range(1, len(steps) + 1))
    pruned = next(p for p in search.suggestions if p.observation.state == "pruned")
    result = store.result(pruned.trial_id)
    assert result["pruned"] == {"step": 2, "steps": 20, "loss": pruned.observation.rung_losses[0]}
    assert result["measurements"] == {}
    assert result["error"] is None
    assert (store.training_directory(pruned.training_id) / "checkpoint").exists()


@pytest.mark.parametrize("is_measured_again", [False, True])
@pytest.mark.parametrize(
    "damage", ["search.json", "points/p0001.json", "points/p0007.json", "gone"]
)
def test_a_history_that_is_made_again_is_the_same(halved, tmp_path, damage, is_measured_again):
    shutil.copytree(halved[0], tmp_path, dirs_exist_ok=True)
    store = Store(tmp_path / "runs")
    before = history(store), read_logged_steps(store)
    path = store.sweep_directory("s") / damage.replace("gone", "points/p0003.json")
    path.write_text(path.read_text().replace("0", "1", 1))
    if damage == "gone":
        path.unlink()
    with pytest.raises(RecordDamaged, match=r"is (damaged|missing).*submit the sweep again"):
        store.sweep("s")
    [found] = verify_record(store, "s").damaged
    assert found.path == f"sweeps/s/points/{path.name}".replace("points/search", "search")
    if is_measured_again:  # a trial whose training went to its end, by way of the rungs
        trained = next(one[-1] for one in before[0] if one[1] == "ok")
        (store.trial_directory(trained) / "result.json").unlink()
    heal(store.sweep_directory("s"))
    _, search, driver = searching(tmp_path)
    summary = driver.run()
    assert (summary.trials_run > 0, summary.exit_code) == (is_measured_again, 0)
    assert (history(store), read_logged_steps(store)) == before
    assert search.flops == halved[2].flops
    assert summary.states["pruned"] == [one[1] for one in before[0]].count("pruned")
    assert not verify_record(store, "s").damaged


def test_flops_are_those_really_spent(tmp_path, halved):
    search = halved[2]
    whole = search.suggestions[0].flops
    steps = sum(
        20 if p.observation.state == "ok" else [2, 7][len(p.observation.rung_losses) - 1]
        for p in search.suggestions
    )
    assert search.flops == pytest.approx(whole * steps / 20)
    budget = SEARCH.replace("trials: 12", f"flops: {4 * whole}")
    store, search, driver = searching(tmp_path / "b", text=budget)
    driver.run()
    assert len(search.suggestions) > 6  # four whole trainings would be four
    assert 4 * whole <= search.flops < 5 * whole
    assert "training FLOPs are spent" in search.stop_reason
    assert find_best(store, search)


def test_a_budget_too_small_for_any_ends_with_one_answer(tmp_path):
    _, search, _ = searching(tmp_path)
    whole = search.plan.trials[0].flops
    text = SEARCH.replace("trials: 12", f"flops: {0.15 * whole}")
    store, search, driver = searching(tmp_path, text=text)
    assert driver.run().exit_code == 0
    assert len(search.suggestions) == 2
    assert [p.observation.state for p in search.suggestions].count("ok") == 1
    best = min(search.suggestions, key=lambda p: p.observation.rung_losses[0])
    assert find_best(store, search) == [best]


MEDIAN = SEARCH.replace("rule: halving, factor: 3", "rule: median, rungs: [0.2, 0.5], startup: 3")


def test_median_prunes_what_is_worse_than_half_of_the_others(tmp_path):
    store, search, driver = searching(tmp_path, text=MEDIAN)
    driver.run()
    for rung in range(2):
        came: list[float] = []
        for point in search.suggestions:
            if len(point.observation.rung_losses) > rung:
                loss, others = point.observation.rung_losses[rung], sorted(came)
                size = len(others)
                goes_on = size < 3 or loss <= (others[(size - 1) // 2] + others[size // 2]) / 2
                reached = len(point.observation.rung_losses) + (point.observation.state == "ok")
                assert (reached > rung + 1) == goes_on
                came.append(loss)
    assert {p.observation.state for p in search.suggestions} == {"ok", "pruned"}
    assert [p.observation.state for p in search.suggestions[:3]] == ["ok"] * 3
    assert min(p.observation.values[0] for p in search.suggestions if p.observation.values) == min(
        away(planned.trial) for planned in search.plan.trials[1:]
    )
    assert store.sweep("s")["cells"]


@pytest.mark.parametrize("objective", ["loss", "hellaswag_acc_norm"])
def test_tpe_learns_from_pruned_trials_whatever_the_sense_of_the_objective(objective):
    """With pruned trials alone, TPE prefers those with the lowest loss at their rung."""
    means = []
    for best in (0.2, 0.8):
        suggested = []
        for seed in range(6):
            config = SearchConfig.model_validate(
                {"ranges": {"training.x": {"low": 0.0, "high": 1.0}}, "objectives": [objective],
                 "seed": seed, "trials": 99}
            )  # fmt: skip
            rng = random.Random(seed)
            xs = [rng.random() for _ in range(30)]
            past = [
                Observation({"training.x": x}, "pruned", rung_losses=[(x - best) ** 2]) for x in xs
            ]
            one = suggest_params(config, [objective_direction(objective)], past)
            suggested.append(one.params["training.x"])
        means.append(sum(suggested) / len(suggested))
    assert abs(means[0] - 0.2) < 0.15
    assert abs(means[1] - 0.8) < 0.15


def test_a_grid_needs_what_a_search_has_pruned(halved):
    folder, store, search = halved
    pruned = next(p for p in search.suggestions if p.observation.state == "pruned")
    rate = pruned.patch["training.learning_rate"]
    grid = f"question: q\nexperiment: e.yaml\nfactors:\n  rate:\n    a: {{training.learning_rate: {rate!r}}}\n"
    planned = plan(load_sweep(write_sweep(folder, grid, "g.yaml")), store, identify=identify)
    assert [one.trial.id for one in planned.trials] == [pruned.trial_id]
    assert planned.trials[0].state == "new"
    assert Driver(planned, store, InlineExecutor(RisingRun(store.path, "g"))).run().exit_code == 0
    assert store.status(pruned.trial_id) == "done"
    assert len(steps_of(store, pruned)) == 20  # on from where it paused


def test_trials_that_share_a_training_stand_at_a_rung_once(tmp_path):
    text = SEARCH.replace("  ranges", "  choices: {serving.kv_dtype: [model, int8]}\n  ranges")
    text = text.replace("ranges:\n    training.learning_rate: {low: 1e-4, high: 1e-1, log: true}",
                        "ranges:\n    training.learning_rate: {low: 1e-3, high: 5e-3, step: 1e-3}")  # fmt: skip
    store, search, driver = searching(tmp_path, text=text.replace("trials: 12", "trials: 9"))
    driver.run()
    trained = [p for p in search.suggestions if p.has_trial]
    assert len({p.training_id for p in trained}) < len(trained) == 9
    for training in {p.training_id for p in trained}:
        sharing = [p for p in trained if p.training_id == training]
        first = sharing[0]
        assert steps_of(store, first) == list(range(1, len(steps_of(store, first)) + 1))
        losses = first.observation.rung_losses[:1]
        assert all(p.observation.rung_losses[:1] in ([], losses) for p in sharing)
    whole = trained[0].flops
    steps = {p.training_id: len(steps_of(store, p)) for p in trained}
    assert search.flops == pytest.approx(whole * sum(steps.values()) / 20)
