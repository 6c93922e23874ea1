"""A matrix of kills: every kind of sweep ends as it does when nobody dies.

Drivers die at random files that they write, and pairs of drivers that share a sweep die together.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from kvlab.fs.atomic_files import file_sha256
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.trial.run import run_task
from tests.support.driver_process import (
    count_logged_steps,
    finish_driver,
    read_logged_steps,
    start_driver,
    wait_for,
)
from tests.support.kill_process import count_deaths
from tests.support.stub_looks import LOOKS, KnownRun, drive_looks, load_looks
from tests.support.stub_trials import SWEEP, StubRun, drive, write_sweep
from tests.support.stub_tuning import TUNED, SurfaceRun
from tests.support.tiny_sweep import BUDGETS, TRUNK_EXPERIMENT, tiny_sweep_folder

NEVER = 10**9


@dataclass(frozen=True)
class Kind:
    """A sweep with stub trials, and the options of a driver in a process of its own."""

    text: str
    run: type[StubRun]
    options: tuple[str, ...] = ()


KINDS = {
    "plain": Kind(SWEEP, StubRun),
    "tuned": Kind(TUNED, SurfaceRun, ("--surfaces",)),
    "looks": Kind(LOOKS, KnownRun, ("--known-loss",)),
}


def drive_and_die(kind: Kind, folder, fewest: int, most: int) -> tuple[Store, int]:
    """Drive a sweep to its end in processes that die on the way; return how many died."""
    sweep, store = load_looks(folder, kind.text), Store(folder / "runs")
    deaths = count_deaths(
        lambda: drive_looks(sweep, store, run=kind.run), random.Random(1), fewest, most
    )
    return store, deaths


def read_record(store: Store):
    """Return the cells, what was decided, and what every trial measured."""
    sweep = store.sweep("s")
    numbers = {trial: store.result(trial)["measurements"] for trial in store.trial_ids()}
    return sweep["cells"], sweep.get("tuning"), (sweep.get("looks") or {}).get("taken"), numbers


@pytest.fixture(params=KINDS)
def calm(request, tmp_path_factory):
    """A kind of sweep, and the store of one that nobody disturbed."""
    kind = KINDS[request.param]
    store, deaths = drive_and_die(kind, tmp_path_factory.mktemp("calm"), NEVER, NEVER)
    assert deaths == 0
    return kind, store


def test_a_driver_that_dies_at_any_file_ends_as_a_calm_one(tmp_path, calm):
    kind, undisturbed = calm
    store, deaths = drive_and_die(kind, tmp_path, 10, 80)
    assert deaths >= 2
    assert read_record(store) == read_record(undisturbed)
    assert all(steps == sorted(set(steps)) for steps in read_logged_steps(store).values())
    before = {path: path.stat().st_mtime_ns for path in store.path.glob("trials/*/result.json")}
    drive_looks(load_looks(tmp_path, kind.text), store, run=kind.run)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is left to do"


@pytest.mark.faults
def test_drivers_that_share_a_sweep_and_die_end_as_a_calm_one(tmp_path, calm):
    kind, undisturbed = calm
    write_sweep(tmp_path, kind.text)
    store, steps = Store(tmp_path / "runs"), count_logged_steps(undisturbed)

    def start(*words):
        return start_driver(tmp_path, *kind.options, *words)

    for share in (0.2, 0.5, 0.7, 0.9):
        pair = [start("--seconds", 0.005) for _ in range(2)]
        wait_for(lambda share=share: count_logged_steps(store) >= share * steps)
        for driver in pair:
            driver.kill()
            driver.communicate()
    pair = [start("--seconds", 0.005) for _ in range(2)]
    assert [finish_driver(driver)["exit"] for driver in pair] == [0, 0]
    assert read_record(store) == read_record(undisturbed)
    assert finish_driver(start())["ran"] == 0


def test_two_drivers_share_every_look(tmp_path):
    write_sweep(tmp_path, LOOKS)
    pair = [start_driver(tmp_path, "--known-loss", "--seconds", 0.005) for _ in range(2)]
    facts = [finish_driver(driver) for driver in pair]
    assert [one["exit"] for one in facts] == [0, 0]
    store = Store(tmp_path / "runs")
    assert len(store.sweep("s")["looks"]["taken"]) == 3
    assert sum(one["ran"] for one in facts) == len(store.trial_ids()) == 19


@pytest.mark.faults
def test_budgets_whose_driver_dies_at_any_write_end_as_in_a_calm_sweep(tmp_path):
    """Real trainings that share a stable phase: weights and curves are the same."""

    def drive_budgets():
        torch.set_num_threads(1)
        store = Store("runs")
        drive(plan(load_sweep("s.yaml"), store), store, lambda trial: run_task(trial, store.path))

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
