"""`tune`: rounds of rates from the record alone, and the cells at the rates that were found."""

import json
import shutil
from pathlib import Path

import pytest

from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep import plan_stage
from kvlab.sweep.planning.planner import SweepPlanner
from kvlab.sweep.planning.stages import plan_at_least, plan_at_most
from tests.report.reading import load, markdown
from tests.support.golden import check_golden
from tests.support.record_factory import TunedRecord
from tests.support.stub_looks import SURFACES, TUNED, KnownRun, SurfaceRun, drive_looks, load_looks
from tests.support.stub_trials import identify, write_sweep
from tests.support.tiny_sweep import (
    EXPERIMENT,
    SWEEP,
    run_kvlab,
    tiny_sweep_folder,
    write_tiny_sweep,
)


def submit(folder: Path, surfaces, text: str = TUNED):
    """Run the stages of a sweep, with surfaces by ``n_kv_head``; return its store and the stages."""
    folder.mkdir(exist_ok=True)
    sweep, store, stages = load_looks(folder, text), Store(folder / "runs"), []
    drive_looks(sweep, store, run=SurfaceRun, script=surfaces, on_plan=stages.append)
    return store, stages


def rates(stage):
    """Return the rate by ``n_kv_head``."""
    experiments = [one.trial.experiment for one in stage.plan.trials]
    return {one.model.n_kv_head: one.training.learning_rate for one in experiments}


def architectures(store):
    return store.sweep("s")["tuning"]["architectures"]


@pytest.mark.parametrize("steep", [1.0, 2.0])
def test_every_architecture_is_trained_at_the_best_rate_within_15_percent(tmp_path, steep):
    best = {2: {"best": 1.7e-3, "steep": steep}, 1: {"best": 2.5e-3, "steep": steep}}
    _, stages = submit(tmp_path, best)
    assert [stage.name for stage in stages] == ["tuning 1", "design"]
    assert len(stages[0].plan.trials) == 2 * 3 * 2  # the tie shares the rate of its training
    assert {one.trial.seed for one in stages[0].plan.trials} == {100, 101}
    found = rates(stages[-1])
    for heads, planted in best.items():
        assert abs(found[heads] / planted["best"] - 1) < 0.15
        assert found[heads] == float(f"{found[heads]:.3g}")
    assert {one.trial.seed for one in stages[-1].plan.trials} == {0, 1}


def test_a_best_at_the_edge_widens_the_grid_of_that_architecture(widened):
    _, store, stages = widened
    assert [stage.name for stage in stages] == ["tuning 1", "tuning 2", "tuning 3", "design"]
    assert stages[1].lines == (
        "heads=mqa serving=plain: next training.learning_rate = 0.008, as the best so far is at the"
        " edge",
    )
    tried = [[point["value"] for point in one["points"]] for one in architectures(store)]
    assert tried == [[1e-3, 2e-3, 4e-3], [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]]
    assert rates(stages[-1])[1] == pytest.approx(9e-3, rel=0.01)
    assert [one["optimum"]["flag"] for one in architectures(store)] == ["", ""]


@pytest.fixture(scope="module")
def widened(tmp_path_factory):
    """Return the folder, the store and the stages of a sweep that was driven to its end."""
    folder = tmp_path_factory.mktemp("widened")
    return folder, *submit(folder, SURFACES)


def test_a_rate_that_diverges_is_worse_than_any_and_a_best_out_of_reach_is_flagged(tmp_path):
    cliffs = {2: {"best": 1.7e-3, "cliff": 3e-3}, 1: {"best": 1.7e-3, "cliff": 0.0}}
    store, stages = submit(tmp_path / "a", cliffs)
    found = architectures(store)
    assert found[0]["points"][-1]["losses"] == {"100": None, "101": None}
    assert rates(stages[-1])[2] == pytest.approx(1.7e-3, rel=0.15)
    assert found[1]["optimum"]["flag"] == "diverged"
    assert rates(stages[-1])[1] == min(point["value"] for point in found[1]["points"])
    store, stages = submit(tmp_path / "b", {**SURFACES, 1: {"best": 1.0}})
    assert len(stages) == 5
    found = architectures(store)[1]["optimum"]
    assert (found["value"], found["flag"]) == (3.2e-2, "edge")
    assert stages[-1].lines[1].endswith("0.032 (the least measured, at the edge of what was tried)")


def test_what_was_decided_stays_decided(tmp_path, widened):
    shutil.copytree(widened[0], tmp_path, dirs_exist_ok=True)
    store, stages = Store(tmp_path / "runs"), widened[2]
    lost = stages[0].plan.trials[0].trial.id
    store.archive_result(lost)
    _, again = submit(tmp_path, SURFACES)
    assert [stage.name for stage in again] == ["design"]
    assert [one.trial.id for one in again[0].plan.trials] == [
        one.trial.id for one in stages[-1].plan.trials
    ]
    assert store.status(lost) is None
    _, other = submit(tmp_path, SURFACES, TUNED.replace("[100, 101]", "[100, 102]"))
    assert other[0].name == "tuning 1"  # another declaration is tuned anew


def test_the_plan_says_the_least_and_the_most(tmp_path, widened):
    sweep = load_sweep(write_sweep(tmp_path, TUNED))
    stage, planner = plan_stage(sweep, None, identify=identify), SweepPlanner(sweep, None, identify)
    assert len(plan_at_least(stage, planner).trials) == 12 + 8
    assert len(plan_at_most(planner).trials) == 12 + 2 * 3 * 2 + 8
    _, store, stages = widened
    assert plan_at_least(stages[-1], planner) is stages[-1].plan
    assert plan_at_most(SweepPlanner(sweep, store, identify)) is None


def test_cells_may_share_a_rate_and_be_tuned_on_fewer_tokens(tmp_path):
    text = TUNED.replace("101]}", "101], share: [heads], tokens: 160}")
    store, stages = submit(tmp_path, SURFACES, text)
    assert {one.trial.experiment.training.tokens for one in stages[0].plan.trials} == {160}
    assert {one.trial.experiment.training.tokens for one in stages[-1].plan.trials} == {320}
    assert rates(stages[-1]) == {2: 1.7e-3, 1: 1.7e-3}
    assert len(architectures(store)) == 1


def test_a_default_that_the_text_lowers_is_lowered_for_a_tuning_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = EXPERIMENT.replace("evaluation: {loss_tokens: 64}\n", "")
    assert experiment != EXPERIMENT
    tune = "tune: {training.learning_rate: [1e-3, 2e-3, 4e-3]}\n"
    write_tiny_sweep(tmp_path, SWEEP + tune, experiment)
    code, out, err = run_kvlab("plan", "s.yaml")
    assert code == 0, err
    assert "evaluation.loss_tokens = " in out, "the text has fewer tokens than the default"


def test_a_cell_that_starts_from_another_keeps_its_own_rate(tmp_path):
    level = "n_kv_head: 1, training.init_from: {heads: mha}, training.learning_rate: 1e-5"
    store, stages = submit(tmp_path, SURFACES, TUNED.replace("n_kv_head: 1", level))
    assert rates(stages[-1]) == {2: 1.7e-3, 1: 1e-5}
    assert len(architectures(store)) == 1
    found = [one for one in stages[-1].plan.trials if one.trial.experiment.model.n_kv_head == 2]
    starts = {one.starts_from for one in stages[-1].plan.trials} - {None}
    assert starts == {one.trial.id for one in found if one.shares_with is None}


SUBMIT = ("submit", "s.yaml", "--executor", "inline", "--no-report")


def test_a_failed_tuning_trial_fails_the_sweep_until_it_is_retried(tmp_path, monkeypatch):
    script = {}
    monkeypatch.setattr(
        "kvlab.cli.commands.submit.run_task",
        lambda task, store, **_: KnownRun(store, script=script)(task),
    )
    with tiny_sweep_folder(tmp_path, SWEEP):
        tune = "tune: {training.learning_rate: [1e-3, 2e-3, 4e-3], seeds: [100]}\n"
        Path("s.yaml").write_text(f"{SWEEP}seeds: [0]\n{tune}")
        prepare_dataset(load_experiment("e.yaml").data)  # the ids are known from then on
        bad = json.loads(run_kvlab("plan", "s.yaml", "--json")[1])["trials"][0]["trial"]
        script[bad, "measure", 0] = "bug"
        code, text, _ = run_kvlab(*SUBMIT)
        assert (code, "1 failed" in text, f"  {bad}  bug" in text) == (1, True, True)
        assert text.count("; 1 tuning trial failed") == 1
        assert "1 failed" in run_kvlab("status", "s")[1]
        assert run_kvlab(*SUBMIT)[0] == 1, "nothing new has run, and the failure is still there"
        script.clear()
        code, text, error = run_kvlab(*SUBMIT, "--retry-failed")
        assert (code, "s, tuning 1" in text, ", 0 failed" in text) == (0, True, True), error
        assert "failed" not in run_kvlab("status", "s")[1]


GOLDEN = Path(__file__).parent / "golden"

RECORDS = {
    "tuned": TunedRecord(),
    "tuned-shorter": TunedRecord(tokens=4096),
    "tuning": TunedRecord(is_over=False),
}


@pytest.mark.parametrize("name", list(RECORDS))
def test_the_report_is_the_golden_one(tmp_path, name):
    check_golden(GOLDEN / f"{name}.txt", markdown(load(RECORDS[name], tmp_path, "tuned")))
