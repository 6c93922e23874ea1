"""A matrix of stops and kills: every kind of sweep ends as one that nobody disturbed.

A stop comes at several events: a start, an end, a rung, between two stages. Kills of the other
kinds of sweeps are in ``tests/faults/test_kills.py``.
"""

import random
from dataclasses import dataclass, field

import pytest

from kvlab.store import Store
from tests.support.driver_process import read_logged_steps
from tests.support.kill_process import count_deaths
from tests.support.stub_looks import LOOKS, KnownRun, drive_looks, load_looks
from tests.support.stub_search import PRUNED, SEARCH, BowlRun, RisingRun, history, searching
from tests.support.stub_trials import SWEEP, StubRun
from tests.support.stub_tuning import TUNED, SurfaceRun


@dataclass(frozen=True)
class Kind:
    """A sweep with stub trials, and the events at which its drivers are stopped in turn."""

    text: str
    run: type[StubRun]
    stops: tuple[int, ...]
    options: dict = field(default_factory=dict)


STEPS = SEARCH.replace("log: true", "step: 0.02").replace("low: 1e-4", "low: 0.02")
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


KINDS = {
    "plain": Kind(SWEEP, StubRun, (3, 5, 8)),
    "looks": Kind(LOOKS, KnownRun, (5, 18, 4)),
    "tuning": Kind(TUNED.replace("[100, 101]", "[100]"), SurfaceRun, (7, 6, 5)),
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


@pytest.mark.parametrize("name", KINDS)
def test_stopped_again_and_again_it_ends_as_one_that_was_not(tmp_path, name):
    kind, calm, rough = KINDS[name], tmp_path / "calm", tmp_path / "rough"
    assert drive(kind, calm).exit_code == 0
    for stop_at in kind.stops:
        summary = drive(kind, rough, stop_at)
        assert (summary.stopped, summary.exit_code) == (True, 130)
        assert not Store(rough / "runs").stop_flag("s").exists()
    assert drive(kind, rough).exit_code == 0
    assert read_record(kind, rough) == read_record(kind, calm)
    for steps in read_logged_steps(Store(rough / "runs")).values():
        assert steps == list(range(1, len(steps) + 1)), "a step was taken twice"


def test_killed_between_any_two_files_a_search_ends_as_one_that_was_not(tmp_path):
    kind, calm, rough = KINDS["pruned tpe"], tmp_path / "calm", tmp_path / "rough"
    drive(kind, calm)
    assert count_deaths(lambda: drive(kind, rough), random.Random(2)) > 2
    assert read_record(kind, rough)[:2] == read_record(kind, calm)[:2]
