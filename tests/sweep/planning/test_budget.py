"""Estimates of memory, hours and money for the trials that are still to run."""

import json
from time import thread_time

import pytest
import torch

from kvlab.benchmark.interleaving import Noise, NoiseWatch
from kvlab.cli.main import main
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_json
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.spec import Experiment
from kvlab.store import Store
from kvlab.sweep.planning import machine_speed
from kvlab.sweep.planning.budget import estimate_budget
from kvlab.sweep.planning.machine_speed import MachineRate
from kvlab.trial import speed_test
from tests.support.stub_trials import SWEEP, StubRun, drive, tiny_plan


def ran(tmp_path, text=SWEEP):
    store = Store(tmp_path / "runs")
    drive(tiny_plan(tmp_path, text=text), store, StubRun(store.path))
    return store


def rewrite(
    store, trial_id, seconds, started="2026-01-01T00:00:00Z", finished="2026-01-01T00:01:00Z"
):
    path = store.trial_directory(trial_id) / "result.json"
    result = read_sealed_json(path)
    result["training_record"] = {"steps": 20, "seconds": seconds, "resumed_from": []}
    result["provenance"] |= {"started": started, "finished": finished}
    write_sealed_json(path, result)


def test_hours_and_money_from_a_stated_rate(tmp_path):
    planned = tiny_plan(tmp_path)
    flops = planned.trials[0].flops
    costs = estimate_budget(planned, None, rate=flops / 3600, price=2.5)
    assert (costs.trials, costs.trainings, costs.device) == (8, 4, "CPU core")
    assert costs.flops == sum(p.flops for p in planned.trials if p.trains)
    assert costs.hours == pytest.approx(costs.flops / flops)
    assert costs.money == pytest.approx(2.5 * costs.hours)


def test_a_rate_is_measured_from_finished_trials(tmp_path):
    store = ran(tmp_path)
    planned = tiny_plan(tmp_path, store)
    for one in planned.trials:
        rewrite(store, one.trial.id, seconds=50.0)
    longer = tiny_plan(tmp_path, store, SWEEP.replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
    costs = estimate_budget(longer, store)
    rates = sorted(p.flops / 50.0 for p in planned.trials)
    assert costs.rate.flops_per_second == pytest.approx((rates[3] + rates[4]) / 2)
    assert (costs.rate.source, costs.rate.results, costs.rate.measure_seconds) == (
        "measured",
        8,
        10.0,
    )
    new = [p for p in longer.trials if not p.has_ended]
    seconds = sum(p.flops for p in new if p.trains) / costs.rate.flops_per_second + 10.0 * len(new)
    assert costs.hours == pytest.approx(seconds / 3600)
    assert estimate_budget(planned, store) is None


def test_trials_at_once_divide_the_time_but_not_the_hours(tmp_path):
    planned = tiny_plan(tmp_path)
    alone, pairs = (estimate_budget(planned, None, rate=1e6, at_once=n) for n in (1, 2))
    assert pairs.hours == alone.hours == pytest.approx(alone.wall_seconds / 3600)
    assert pairs.wall_seconds == pytest.approx(alone.wall_seconds / 2)
    longest = max(p.flops / 1e6 for p in planned.trials if p.trains)
    many = estimate_budget(planned, None, rate=1e6, at_once=100)
    assert many.wall_seconds == pytest.approx(longest), "one trial is not divided"


def test_a_new_user_gets_a_time_from_the_machine(tmp_path, monkeypatch):
    planned, announced, asked = tiny_plan(tmp_path), [], []
    monkeypatch.setattr(machine_speed, "get_data_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(machine_speed, "write_json", write_json)
    monkeypatch.setattr(machine_speed, "_measure", lambda *of: asked.append(of) or MachineRate(1e6))
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
    assert asked[1][0]["model"]["n_embd"] == 64, "a rate is that of the planned shape"
    assert asked[1][0]["training"]["precision"] == "bfloat16"


def test_on_a_busy_machine_the_rate_is_that_of_one_thread(tmp_path, monkeypatch):
    """Threads that wait for each other while others use the cores would give a tenth of it."""
    facts = machine_speed.make_short_training(tiny_plan(tmp_path).trials[0].trial.experiment)
    short_training = Experiment.model_validate_json(json.dumps(facts))
    set_threads = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.setattr(speed_test, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(speed_test, "_measure_rate", lambda _, clock: {thread_time: 5.0}[clock])
    monkeypatch.setattr(NoiseWatch, "read_noise", lambda _: Noise(0.9))
    found = speed_test.measure_training_rate(short_training, 4)
    assert (found, set_threads) == ({"flops_per_second": 20.0, "is_scaled": True}, [1])


def test_measuring_counts_the_items_of_hellaswag(tmp_path):
    planned = tiny_plan(tmp_path)
    with_items = tiny_plan(
        tmp_path, None, SWEEP.replace("{}", "{evaluation.hellaswag: 1000}").replace(
            '"adjacent:2"}', '"adjacent:2", evaluation.hellaswag: 1000}'
        ),
    )  # fmt: skip
    costs, more = (
        estimate_budget(one, None, on_calibration=lambda: None) for one in (planned, with_items)
    )
    assert more.rate.measure_seconds > 0.5 + costs.rate.measure_seconds


def test_finished_trials_of_another_size_say_nothing_about_the_rate(tmp_path):
    store = ran(tmp_path)
    for one in tiny_plan(tmp_path, store).trials:
        rewrite(store, one.trial.id, seconds=50.0)
    wide = SWEEP.replace("plain: {}", "plain: {model.n_embd: 64}").replace(
        "tied: {", "tied: {model.n_embd: 64, "
    )
    assert estimate_budget(tiny_plan(tmp_path, store, wide), store).rate is None


def test_a_price_without_a_rate_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--price = 3 needs a rate.*--rate FLOPS"):
        estimate_budget(tiny_plan(tmp_path), Store(tmp_path / "runs"), price=3.0)


def test_the_memory_of_the_largest_trial_is_compared(tmp_path):
    planned = tiny_plan(tmp_path)
    costs = estimate_budget(planned, None)
    assert costs.fits is None
    both = costs.peak_bytes + costs.process_bytes
    assert estimate_budget(planned, None, memory=both).fits
    assert not estimate_budget(planned, None, memory=both - 1).fits


def test_trials_that_run_at_once_share_the_memory(tmp_path):
    planned = tiny_plan(tmp_path)
    costs = estimate_budget(planned, None)
    peak = costs.peak_bytes + costs.process_bytes
    assert estimate_budget(planned, None, memory=3 * peak, at_once=3).fits
    assert not estimate_budget(planned, None, memory=3 * peak, at_once=4).fits
    few = estimate_budget(planned, None, memory=8 * peak, at_once=100)  # there are only eight
    assert (few.at_once, few.fits) == (8, True)


def test_the_command_prints_the_budget_and_the_differences(tmp_path, capsys):
    tiny_plan(tmp_path)
    command = ["plan", str(tmp_path / "s.yaml"), "--store", str(tmp_path / "runs")]
    assert main([*command, "--rate", "1e9", "--price", "2", "--memory", "1kB", "--why"]) == 0
    text = capsys.readouterr().out
    assert "Still to run: 8 trials, 4 trainings of" in text
    assert "and 450 MB of its process" in text
    assert "Time: about " in text
    assert "1 GFLOP/s a trial, as stated." in text
    assert "more than the 1 kB there are; lower resources.microbatch_tokens" in text
    assert "has no result: the store has no finished trial at all" in text
    assert main([*command, "--json", "--rate", "1e9"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"]["trials"] == 8
    assert main([*command, "--why", "zz"]) == 2
    assert "--why = zz fits no trial" in capsys.readouterr().err
