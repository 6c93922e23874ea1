"""Plans: cells and seeds as trials, shared trainings, and states in the store."""

from pathlib import Path

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.commands.plan import explain_equality
from kvlab.spec import load_sweep
from kvlab.sweep import plan
from kvlab.sweep.planning.planner import describe_sweep, plan_estimand
from tests.support.stub_trials import SWEEP, StubRun, drive, identify, tiny_plan, write_sweep

ROOT = Path(__file__).parents[3]


def states(planned):
    return [one.state for one in planned.trials]


def test_the_baseline_comes_first_and_seeds_stay_together(tmp_path):
    text = SWEEP + "baseline: {heads: mqa, serving: tied}\n"
    planned = tiny_plan(tmp_path, text=text)
    first = planned.trials[0]
    assert dict(first.levels) == {"heads": "mqa", "serving": "tied"}
    assert [one.trial.seed for one in planned.trials] == [0, 1] * 4
    assert planned.cells[0].trials == {0: first.trial.id, 1: planned.trials[1].trial.id}


@pytest.mark.parametrize(
    ("decide", "entering"),
    [
        ("", {"plain"}),
        ("decide: {over: {serving: [tied]}}\n", {"tied"}),
        ("decide: {over: {serving: [plain, tied]}}\n", {"plain", "tied"}),
    ],
)
def test_a_plan_takes_means_over_the_cells_that_the_study_does(tmp_path, store, decide, entering):
    planned = tiny_plan(tmp_path, store, SWEEP + decide)
    store.write_sweep(describe_sweep(planned, yaml="", experiment_yaml="", command=""))
    drive(planned, store, StubRun(store.path))
    cells = [tuple(cell.levels.values()) for cell in planned.cells]
    for estimand in (plan_estimand(planned.sweep, cells), Study.load(store, "s").estimand):
        assert {serving for _, serving in filter(estimand.enters_means, cells)} == entering


def test_states_follow_the_store(tmp_path, store, planned):
    assert planned.tokens == 4 * 320
    assert planned.flops == sum(one.flops for one in planned.trials) // 2
    assert states(planned) == ["new", "new", "shares training", "shares training"] * 2
    totals = "8 trials, 4 trainings: 4 trials share a training with another"
    assert planned.format_totals() == totals
    leader, sharing = planned.trials[0], planned.trials[2]
    assert (sharing.shares_with, leader.shares_with) == (leader.trial.id, None)
    assert sharing.trial.training_id == leader.trial.training_id
    assert sharing.kv_bytes < leader.kv_bytes
    first, _, third = (one.trial for one in planned.trials[:3])
    StubRun(store.path)(first)
    assert tiny_plan(tmp_path, store).tokens == 3 * 320
    for number, act in ((1, "bug"), (4, "diverge")):
        trial = planned.trials[number].trial
        StubRun(store.path, script={(trial.id, "train", 0): act})(trial)
    again = tiny_plan(tmp_path, store)
    # what shares the training of a failed trial has to train it after all
    assert states(again) == [
        "done", "failed", "shares training", "new", "diverged", "new", "new", "shares training"
    ]  # fmt: skip
    assert again.trials[2].trial == third
    path = store.trial_directory(first.id) / "result.json"
    path.write_bytes(path.read_bytes()[:50])
    assert tiny_plan(tmp_path, store).trials[0].state == "shares training"


def test_cells_that_compute_the_same_are_one_trial(tmp_path):
    same = "{model.window: 8, model.attention_pattern: GL}"
    text = SWEEP.replace('{serving.tie: "adjacent:2"}', same).replace("seeds: [0, 1]\n", "")
    planned = tiny_plan(tmp_path, text=text)
    assert [len(one.cells) for one in planned.trials] == [2, 2]
    one, other = (cell.experiment for cell in planned.sweep.cells()[:2])
    keys = "model.window, model.attention_pattern"
    assert explain_equality(one, other) == f"nothing that is computed depends on {keys} here"


def test_text_paths_are_found_from_any_folder_and_do_not_enter_ids(tmp_path, monkeypatch):
    ids_by_folder = []
    for folder_name in ("one", "two"):
        folder = tmp_path / folder_name
        (folder / "texts").mkdir(parents=True)
        path = write_sweep(folder)
        experiment = (folder / "e.yaml").read_text()
        data = "data: {source: files, paths: [texts], tokenizer: bytes}"
        (folder / "e.yaml").write_text(experiment.replace("data: {tokenizer: bytes}", data))
        monkeypatch.chdir(folder)
        planned = plan(load_sweep(path.name), identify=identify)
        assert planned.trials[0].trial.experiment.data.paths == (str(folder / "texts"),)
        ids_by_folder.append([one.trial.id for one in planned.trials])
    assert ids_by_folder[0] == ids_by_folder[1]
