"""A matrix of stops and kills: every kind of sweep ends as one that nobody disturbed.

A stop comes at several events: a start, an end, a rung, between two stages. Drivers die at random
files that they write, and pairs of drivers that share a sweep die together.
"""

import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from kvlab.fs.atomic_files import file_sha256
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.trial.run import run_task
from kvlab.trial.torch_trainable import TorchTrainable
from tests.support import stub_trials, tiny_sweep
from tests.support.chaos_checks import numbers
from tests.support.driver_process import (
    count_logged_steps,
    finish_driver,
    kill_started_drivers,  # noqa: F401 (a fixture)
    read_logged_steps,
    start_driver,
    wait_for,
)
from tests.support.extensions import needs
from tests.support.hellaswag_items import ITEMS
from tests.support.kill_process import count_deaths
from tests.support.stub_looks import LOOKS, TUNED, KnownRun, SurfaceRun, drive_looks, load_looks
from tests.support.stub_search import PRUNED, SEARCH, STEPS, BowlRun, RisingRun, history, searching
from tests.support.stub_trials import SWEEP, StubRun, write_sweep
from tests.support.tiny_sweep import BUDGETS, TRUNK_EXPERIMENT, tiny_sweep_folder

NEVER = 10**9


@dataclass(frozen=True)
class Kind:
    """A sweep with stub trials.

    Attributes:
        stops: Events at which its drivers are stopped in turn.
        options: Of a driver in a process of its own.
    """

    text: str
    run: type[StubRun]
    stops: tuple[int, ...]
    options: tuple[str, ...] = ()


SAMPLERS = {
    "tpe": "{name: TPESampler, multivariate: true, group: true, n_startup_trials: 3, n_ei_candidates: 8}",
    "nsga2": "{name: nsgaii, population_size: 4, crossover: SBXCrossover, mutation: PolynomialMutation, mutation_prob: 0.5}",
    "qmc": "{name: qmc, qmc_type: halton, scramble: true}",
    "brute_force": "{name: brute_force, avoid_premature_stop: true}",
}


def search(sampler):
    text = STEPS if sampler == "brute_force" else SEARCH
    text = text.replace("trials: 12", f"trials: 8\n  sampler: {SAMPLERS[sampler]}")
    return Kind(text, BowlRun, (1, 4, 5))


def pruned(sampler, objectives="[loss]"):
    text = PRUNED.replace("sampler: random", f"sampler: {sampler}").replace("[loss]", objectives)
    text = text.replace("  objectives", "  choices: {model.n_kv_head: [1, 2]}\n  objectives")
    return Kind(text, RisingRun, (2, 3, 5, 11))


SHARED = {
    "plain": Kind(SWEEP, StubRun, (3, 5, 8)),
    "looks": Kind(LOOKS, KnownRun, (5, 18, 4), ("--known-loss",)),
    "tuning": Kind(TUNED.replace("[100, 101]", "[100]"), SurfaceRun, (7, 6, 5), ("--surfaces",)),
}
"""Sweeps that several drivers may have."""
KINDS = {
    **SHARED,
    **{f"search {sampler}": search(sampler) for sampler in SAMPLERS},
    "pruned tpe": pruned("tpe"),
    "pruned gp front": pruned("gp", "[loss, kv_bytes]"),
}


def drive(kind, folder, stop_at=0):
    """Drive a sweep until its end or a stop; return its summary."""
    if "search:" in kind.text:
        return searching(folder, kind.text, run=kind.run, stop_at=stop_at)[2].run()
    folder.mkdir(exist_ok=True)
    sweep, store = load_looks(folder, kind.text), Store(folder / "runs")
    return drive_looks(sweep, store, run=kind.run, stop_at=stop_at)


def read_record(kind, folder):
    """Return what was decided, what every trial measured, and the steps of each training."""
    store = Store(folder / "runs")
    sweep = store.sweep("s")
    decided = history(store) if "search:" in kind.text else sweep
    ends = {trial: store.result(trial) for trial in store.trial_ids()}
    ends = {trial: (one["status"], one["measurements"]) for trial, one in ends.items()}
    return decided, ends, read_logged_steps(store)


@pytest.fixture
def calm(tmp_path, name):
    """The record of a sweep that nobody disturbed, by name of its kind."""
    assert drive(KINDS[name], tmp_path / "calm").exit_code == 0
    return read_record(KINDS[name], tmp_path / "calm")


@pytest.mark.parametrize("name", KINDS)
def test_stopped_again_and_again_it_ends_as_one_that_was_not(tmp_path, name, calm):
    kind, rough = KINDS[name], tmp_path / "rough"
    for stop_at in kind.stops:
        summary = drive(kind, rough, stop_at)
        assert (summary.stopped, summary.exit_code) == (True, 130)
        assert not Store(rough / "runs").stop_flag("s").exists()
    assert drive(kind, rough).exit_code == 0
    assert read_record(kind, rough) == calm
    for steps in read_logged_steps(Store(rough / "runs")).values():
        assert steps == list(range(1, len(steps) + 1)), "a step was taken twice"


@pytest.mark.parametrize("name", [*SHARED, "pruned tpe"])
def test_killed_between_any_two_files_it_ends_as_one_that_was_not(tmp_path, name, calm):
    kind, rough = KINDS[name], tmp_path / "rough"
    most = (10, 80) if name in SHARED else (5, 45)
    assert count_deaths(lambda: drive(kind, rough), random.Random(2), *most) >= 2
    assert read_record(kind, rough)[:2] == calm[:2]
    store = Store(rough / "runs")
    assert all(steps == sorted(set(steps)) for steps in read_logged_steps(store).values())
    before = {path: path.stat().st_mtime_ns for path in store.path.glob("trials/*/result.json")}
    drive(kind, rough)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is left to do"


@pytest.mark.faults
@pytest.mark.parametrize("name", SHARED)
def test_drivers_that_share_a_sweep_and_die_end_as_a_calm_one(tmp_path, name, calm):
    kind, rough = KINDS[name], tmp_path / "rough"
    rough.mkdir()
    write_sweep(rough, kind.text)
    store, steps = Store(rough / "runs"), count_logged_steps(Store(tmp_path / "calm" / "runs"))

    def start_pair():
        return [start_driver(rough, *kind.options, "--seconds", 0.005) for _ in range(2)]

    for share in (0.3, 0.7):
        pair = start_pair()
        wait_for(lambda share=share: count_logged_steps(store) >= share * steps)
        for driver in pair:
            driver.kill()
            driver.communicate()
    assert [finish_driver(driver)["exit"] for driver in start_pair()] == [0, 0]
    assert read_record(kind, rough)[:2] == calm[:2]
    assert finish_driver(start_driver(rough, *kind.options))["ran"] == 0


@needs("looks")
def test_two_drivers_share_every_look(tmp_path):
    write_sweep(tmp_path, LOOKS)
    pair = [start_driver(tmp_path, "--known-loss", "--seconds", 0.005) for _ in range(2)]
    facts = [finish_driver(driver) for driver in pair]
    assert [one["exit"] for one in facts] == [0, 0]
    store = Store(tmp_path / "runs")
    assert len(store.sweep("s")["looks"]["taken"]) == 3
    assert len(store.trial_ids()) == 19
    # a driver may find that a trial which it was about to run has just ended: it counts it, too
    attempts = [*(tmp_path / "runs" / "trials").glob("*/attempts/*")]
    assert sum(one["ran"] for one in facts) >= len(attempts) == 19


@pytest.mark.faults
def test_budgets_whose_driver_dies_at_any_write_end_as_in_a_calm_sweep(tmp_path):
    """Real trainings that share a stable phase: weights and curves are the same."""

    def drive_budgets():
        torch.set_num_threads(1)
        store = Store("runs")
        planned = plan(load_sweep("s.yaml"), store)
        stub_trials.drive(planned, store, lambda trial: run_task(trial, store.path))

    found = {}
    for name, (fewest, most) in {"calm": (NEVER, NEVER), "killed": (12, 40)}.items():
        (tmp_path / name).mkdir()
        with tiny_sweep_folder(tmp_path / name, BUDGETS, TRUNK_EXPERIMENT):
            calls = ("replace", "link", "fsync")
            deaths = count_deaths(drive_budgets, random.Random(0), fewest, most, calls)
        store = Store(tmp_path / name / "runs")
        found[name] = {}
        for path in store.path.glob("trainings/*/training.json"):
            record = read_sealed_json(path)
            curves = record["train_curve"], record["validation_curve"]
            weights = file_sha256(path.parent / "final/model.safetensors")
            found[name][path.parent.name] = (weights, curves)
    assert deaths > 4
    assert len(found["calm"]) == 3
    assert found["killed"] == found["calm"]
    (trunk,) = (store.path / "trunks").iterdir()
    assert store.trunk_steps(trunk.name) == [7, 12]


MEASURED_EXPERIMENT = tiny_sweep.EXPERIMENT.replace(
    "evaluation: {", "serving: {kv_dtype: int8}\nevaluation: {hellaswag: 7, served: true, "
)


class DyingTrainable(TorchTrainable):
    """A real trial that dies at the first, second, fourth, ... report of what it measures."""

    def __init__(self, trial, report):
        counts = Counter()

        def report_and_die(update):
            report(update)
            counts[update["stage"]] += 1
            mark = Path(f"died-{trial.id}-{update['stage']}-{counts[update['stage']]}")
            is_power_of_two = counts[update["stage"]].bit_count() == 1
            if (
                update["stage"] in ("evaluation", "benchmark")
                and is_power_of_two
                and not mark.exists()
            ):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        super().__init__(trial, report_and_die)


@pytest.mark.faults
def test_trials_that_die_wherever_they_measure_have_the_numbers_of_calm_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.evaluate.evaluation.load_hellaswag", lambda *_, **__: ITEMS)
    monkeypatch.setattr("kvlab.evaluate.evaluation.REPORT_SECONDS", 0.0)
    found = {}
    for name, trainable in {"calm": TorchTrainable, "killed": DyingTrainable}.items():

        def drive_measured(trainable=trainable):
            torch.set_num_threads(1)
            store = Store("runs")
            run = partial(run_task, store=store.path, make_trainable=trainable)
            stub_trials.drive(plan(load_sweep("s.yaml"), store), store, run)

        (tmp_path / name).mkdir()
        with tiny_sweep_folder(tmp_path / name, tiny_sweep.SWEEP, MEASURED_EXPERIMENT) as folder:
            count_deaths(drive_measured, random.Random(0), NEVER, NEVER)
            found[name] = numbers(Store("runs"), folder)
            marks = Counter(path.name.split("-")[2] for path in folder.glob("died-*"))
    assert marks.keys() == {"evaluation", "benchmark"}
    assert marks.total() > 8
    assert found["killed"] == found["calm"]
