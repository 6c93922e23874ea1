"""Estimates of memory, hours and money for the trials that are still to run."""

import json
from time import thread_time

import pytest
import torch

from kvlab.benchmark.interleaving import Noise, NoiseWatch
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_json
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.spec import Experiment
from kvlab.sweep.planning import budget
from kvlab.sweep.planning.budget import estimate_budget
from kvlab.trial import speed_test
from tests.support.stub_trials import SWEEP, tiny_plan


def test_hours_and_money_from_a_stated_rate(planned):
    flops = planned.trials[0].flops
    costs = estimate_budget(planned, None, rate=flops / 3600, price=2.5)
    assert (costs.trials, costs.trainings, costs.device) == (8, 4, "CPU core")
    assert costs.flops == sum(p.flops for p in planned.trials if p.trains)
    assert costs.hours == pytest.approx(costs.flops / flops)
    assert costs.money == pytest.approx(2.5 * costs.hours)
    with pytest.raises(UsageError, match=r"--price = 3 needs a rate.*--rate FLOPS"):
        estimate_budget(planned, None, price=3.0)
    alone, pairs, many = (estimate_budget(planned, None, rate=1e6, at_once=n) for n in (1, 2, 100))
    assert pairs.hours == alone.hours == pytest.approx(alone.wall_seconds / 3600)
    assert pairs.wall_seconds == pytest.approx(alone.wall_seconds / 2)
    assert many.wall_seconds == pytest.approx(flops / 1e6), "one trial is not divided"


def test_a_rate_is_measured_from_finished_trials(tmp_path, store, driven):  # noqa: ARG001
    planned = tiny_plan(tmp_path, store)
    for one in planned.trials:
        path = store.trial_directory(one.trial.id) / "result.json"
        result = read_sealed_json(path)
        result["training_record"] = {"steps": 20, "seconds": 50.0, "resumed_from": []}
        times = {"started": "2026-01-01T00:00:00Z", "finished": "2026-01-01T00:01:00Z"}
        result["provenance"] |= times
        write_sealed_json(path, result)
    longer = tiny_plan(tmp_path, store, SWEEP.replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
    costs = estimate_budget(longer, store)
    rates = sorted(p.flops / 50.0 for p in planned.trials)
    assert costs.rate.flops_per_second == pytest.approx((rates[3] + rates[4]) / 2)
    rate = costs.rate
    assert (rate.source, rate.results, rate.measure_seconds) == ("measured", 8, 10.0)
    new = [p for p in longer.trials if not p.has_ended]
    seconds = sum(p.flops for p in new if p.trains) / costs.rate.flops_per_second + 10.0 * len(new)
    assert costs.hours == pytest.approx(seconds / 3600)
    assert estimate_budget(planned, store) is None
    wide = SWEEP.replace("plain: {}", "plain: {model.n_embd: 64}")
    wide = wide.replace("tied: {", "tied: {model.n_embd: 64, ")
    assert estimate_budget(tiny_plan(tmp_path, store, wide), store).rate is None, "another size"


def test_a_new_user_gets_a_time_from_the_machine(tmp_path, monkeypatch):
    planned, announced, asked = tiny_plan(tmp_path), [], []
    rate = {"flops_per_second": 1e6, "is_scaled": False}
    monkeypatch.setattr(budget, "get_data_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(budget, "write_json", write_json)
    monkeypatch.setattr(budget, "_measure", lambda *of: asked.append(of) or rate)
    assert estimate_budget(planned, None).rate is None, "nothing is measured unless allowed"
    costs = estimate_budget(planned, None, on_calibration=lambda: announced.append(1))
    assert (costs.rate.source, costs.rate.flops_per_second) == ("machine", 1e6)
    assert costs.rate.measure_seconds > 0
    again = estimate_budget(planned, None, on_calibration=lambda: announced.append(2))
    assert (again.wall_seconds, announced, len(asked)) == (costs.wall_seconds, [1], 1)
    [(_, threads)] = asked
    assert threads == 1
    wide = SWEEP.replace("plain: {}", "plain: {model.n_embd: 64, training.precision: bfloat16}")
    wide = wide.replace("tied: {", "tied: {model.n_embd: 64, training.precision: bfloat16, ")
    estimate_budget(tiny_plan(tmp_path, None, wide), None, on_calibration=lambda: None)
    items = SWEEP.replace("{}", "{evaluation.hellaswag: 1000}").replace(
        '"adjacent:2"}', '"adjacent:2", evaluation.hellaswag: 1000}'
    )
    scored = estimate_budget(tiny_plan(tmp_path, None, items), None, on_calibration=lambda: None)
    assert scored.rate.measure_seconds > 0.5 + costs.rate.measure_seconds
    assert asked[1][0]["model"]["n_embd"] == 64, "a rate is that of the planned shape"
    assert asked[1][0]["training"]["precision"] == "bfloat16"


def test_on_a_busy_machine_the_rate_is_that_of_one_thread(tmp_path, monkeypatch):
    """Threads that wait for each other while others use the cores would give a tenth of it."""
    facts = budget.make_short_training(tiny_plan(tmp_path).trials[0].trial.experiment)
    short_training = Experiment.model_validate_json(json.dumps(facts))
    set_threads = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.setattr(speed_test, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(speed_test, "_measure_rate", lambda _, clock: {thread_time: 5.0}[clock])
    monkeypatch.setattr(NoiseWatch, "read_noise", lambda _: Noise(0.9))
    found = speed_test.measure_training_rate(short_training, 4)
    assert (found, set_threads) == ({"flops_per_second": 20.0, "is_scaled": True}, [1])


def test_the_memory_of_the_largest_trial_is_compared(planned):
    costs = estimate_budget(planned, None)
    assert costs.fits is None
    both = costs.peak_bytes + costs.process_bytes
    assert estimate_budget(planned, None, memory=both).fits
    assert not estimate_budget(planned, None, memory=both - 1).fits
    assert estimate_budget(planned, None, memory=3 * both, at_once=3).fits
    assert not estimate_budget(planned, None, memory=3 * both, at_once=4).fits
    few = estimate_budget(planned, None, memory=8 * both, at_once=100)  # there are only eight
    assert (few.at_once, few.fits) == (8, True)
