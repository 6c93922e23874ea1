"""Estimates of memory, hours and money for the trials that are still to run; the memory check, with
machines given as numbers."""

import json
from time import thread_time
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from kvlab.benchmark.interleaving import NoiseWatch
from kvlab.errors import ResourceError, UsageError
from kvlab.fs.atomic_files import write_json
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.layout import training_peak_bytes
from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.layout.training_memory import CPU_PROCESS_BYTES
from kvlab.machine import host_memory
from kvlab.spec import Experiment
from kvlab.sweep.planning import budget
from kvlab.sweep.planning.budget import (
    LOWER_BOUND_FACTOR,
    MachineMemory,
    check_memory,
    estimate_budget,
    measure_machine_memory,
)
from kvlab.trial import speed_test
from tests.support.extensions import needs
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
    del result["experiment"]["resources"]  # of a version that recorded less, or changed by hand
    write_sealed_json(path, result)
    assert estimate_budget(longer, store).rate.results == 7


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
    own = planned.trials[0].trial.experiment.training
    steps = {key: asked[0][0]["training"][key] for key in ("batch_tokens", "optimizer")}
    assert steps == {"batch_tokens": own.batch_tokens, "optimizer": "adamw"}


@needs("limit")
def test_parts_of_unknown_duration_are_named(tmp_path, monkeypatch):
    rate = {"flops_per_second": 1e6, "is_scaled": False}
    monkeypatch.setattr(budget, "_measure", lambda *_: rate)
    monkeypatch.setattr(budget, "write_json", lambda *_: None)
    parts = "{benchmark.parts: [limit], benchmark.memory: 1e9}"
    planned = tiny_plan(tmp_path, None, SWEEP.replace("{}", parts))
    costs = estimate_budget(planned, None, on_calibration=lambda: None)
    assert costs.rate.left_out == ("limit",)


def test_on_a_busy_machine_the_rate_is_that_of_one_thread(tmp_path, monkeypatch):
    """Threads that wait for each other while others use the cores would give a tenth of it."""
    facts = budget.make_short_training(tiny_plan(tmp_path).trials[0].trial.experiment)
    short_training = Experiment.model_validate_json(json.dumps(facts))
    set_threads = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.setattr(speed_test, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(speed_test, "_measure_rate", lambda _, clock: {thread_time: 5.0}[clock])
    monkeypatch.setattr(NoiseWatch, "read_noise", lambda _: "busy")
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


ONE = """\
question: q
experiment: e.yaml
factors:
  width:
    base: {model.n_embd: 64, model.block_size: 16, training.batch_tokens: 256, training.tokens: 512%s}
"""


def plan_one(tmp_path, resources="cpus: 1.0"):
    resources = f", resources.{resources}, resources.microbatch_tokens: 256"
    return tiny_plan(tmp_path, text=ONE % resources).trials


def peaks(trials):
    """Return the predicted bytes at the requested microbatch, and at one row, with a process."""
    experiment = trials[0].trial.experiment
    smallest = experiment.resources.model_copy(update={"microbatch_tokens": 16})
    least = experiment.model_copy(update={"resources": smallest})
    own = CONTEXT_BYTES if experiment.resources.devices else CPU_PROCESS_BYTES
    return training_peak_bytes(experiment) + own, training_peak_bytes(least) + own


def lines(trials, *machines, alone=False):
    return list(check_memory(trials, [MachineMemory(*one) for one in machines], alone))


def test_what_cannot_fit_at_any_microbatch_is_refused_and_what_might_is_warned_of(tmp_path):
    trials = plan_one(tmp_path)
    peak, least = peaks(trials)
    assert peak > least
    assert lines(trials, (peak, 0, 1)) == []
    [line] = lines(trials, (peak - 1, 0, 1))
    assert "memory may run out" in line
    assert "lower resources.microbatch_tokens" in line
    assert len(lines(trials, (int(LOWER_BOUND_FACTOR * least) + 1, 0, 1))) == 1
    too_small = (int(LOWER_BOUND_FACTOR * least) - 1, 0, 1)
    with pytest.raises(ResourceError, match=r"cannot be trained here.*one row of 16 tokens"):
        lines(trials, too_small)
    assert lines(trials, too_small, (2 * peak, 0, 1)) == [], "the largest machine decides"
    assert lines(trials) == [], "none has answered"
    assert lines([one for one in trials if not one.trains], too_small) == []


def test_trials_that_run_at_once_share_the_memory(tmp_path):
    trials = plan_one(tmp_path)
    machine = (3 * peaks(trials)[0], 0, 4)
    [line] = lines(trials, machine)
    assert "4 such trials at once" in line
    assert "raise resources.cpus so that fewer run at once" in line
    assert lines(trials, machine, alone=True) == []
    assert lines(plan_one(tmp_path, "cpus: 2.0"), machine) == []


def test_a_gpu_has_its_own_memory_less_what_a_process_takes_anyway(tmp_path):
    trials = plan_one(tmp_path, "gpus: 1.0")
    peak, least = peaks(trials)
    assert lines(trials, (1, peak, 1)) == []
    with pytest.raises(ResourceError, match="and a GPU has"):
        lines(trials, (10**15, int(LOWER_BOUND_FACTOR * least) - 1, 1), alone=True)
    assert lines(trials, (1, 0, 1)) == []  # not known
    [line] = lines(plan_one(tmp_path, "gpus: 0.25"), (1, peak, 1))
    assert "4 such trials at once" in line
    assert "raise resources.gpus" in line


def test_a_machine_says_what_it_has(monkeypatch):
    sizes = [81559 * 2**20, 143771 * 2**20]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(sizes))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    memory = lambda index: SimpleNamespace(total=sizes[index])  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    machine = measure_machine_memory()
    assert machine.device == 143771 * 2**20
    assert 0 < machine.host == host_memory() <= psutil.virtual_memory().total
    assert machine.cores >= 1
