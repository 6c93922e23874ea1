"""Looks of a sweep: what is trained after each, what is recorded, what is refused."""

import pytest

from kvlab.errors import SpecError
from kvlab.store import Store
from kvlab.sweep.planning.planner import SweepPlanner
from kvlab.sweep.planning.stages import plan_at_most, plan_stage
from tests.support.extensions import needs
from tests.support.stub_looks import LOOKS, drive_looks, load_looks, read_decisions
from tests.support.stub_trials import identify


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """Return the folder and the printed lines of a sweep that was driven to its end."""
    folder, lines = tmp_path_factory.mktemp("looks"), []
    drive_looks(load_looks(folder), Store(folder / "runs"), lines=lines)
    return folder, lines


def test_what_is_declared_before_the_first_trial_decides_who_gets_more_seeds(tmp_path, store):
    """Only what is undecided does, with its partner."""
    text = LOOKS.replace("seeds: {looks: [3, 5, 7]}", "seeds: {looks: [2, 5, 7]}")
    stages = []

    def note(stage):
        declared = stage.declaration["looks"]
        assert declared == store.sweep("s")["stages"]["declared"]["looks"]
        assert stages or not store.trial_ids()
        stages.append(stage)

    drive_looks(load_looks(tmp_path, text), store, on_stage=note)
    declared = stages[0].declaration["looks"]
    assert declared["seeds"] == {"looks": [2, 5, 7], "first": 0}
    assert declared["decide"]["claims"] == ["heads=mqa", "position=rope"]
    seeds, taken = read_decisions(store)
    assert [stage.name for stage in stages][:2] == ["look 1 of 3", "look 2 of 3"]
    assert seeds["mqa learned"] == 5 < seeds["mha rope"] == seeds["mha learned"]
    outcomes = [look["states"]["heads=mqa"]["outcome"] for look in taken]
    assert outcomes[:2] == ["", "worse"]


def test_a_finished_sweep_plans_nothing_and_decides_the_same_again(driven):
    folder, lines = driven
    store, again = Store(folder / "runs"), []
    before = read_decisions(store)
    summary = drive_looks(load_looks(folder), store, lines=again)
    assert (summary.trials_run, again) == (0, [])
    assert read_decisions(store) == before
    assert any("heads=mqa worse: +0.2" in line for line in lines)


@pytest.mark.parametrize("seeds", [range(3), [6]])
def test_failed_trials_that_are_run_again_make_one_more_look(driven, tmp_path, store, seeds):
    """All of a claim's first trials fail, which ends the sweep; or one at the last look."""
    calm, _ = driven
    sweep = load_looks(tmp_path, LOOKS + "failures: {same_error: 0}\n")
    every = plan_at_most(SweepPlanner(sweep, None, identify)).trials
    level = ("heads", "mqa") if len(seeds) > 1 else ("position", "rope")
    bad = [p.trial.id for p in every if p.levels[level[0]] == level[1] and p.trial.seed in seeds]
    drive_looks(sweep, store, script={(trial, "measure", 0): "bug" for trial in bad})
    before = read_decisions(store)[1]
    for trial in bad:  # as `kvlab submit --retry-failed` does
        if store.status(trial) == "failed":
            store.archive_result(trial)
    drive_looks(sweep, store)
    after = read_decisions(store)[1]
    assert after[: len(before)] == before
    assert len(after) > len(before)
    calm_states, claim = read_decisions(Store(calm / "runs"))[1][-1]["states"], "=".join(level)
    assert after[-1]["states"][claim]["outcome"] == calm_states[claim]["outcome"]
    first, last = (max(looks[-1]["states"][claim]["sizes"], default=0) for looks in (before, after))
    assert first < last


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[3, 5, 7]", "[3, 5, 9]", "s.yaml:11:16: seeds.looks = [3, 5, 9] was [3, 5, 7]"),
        ("n_kv_head: 1", "n_kv_head: 1, model.n_embd: 16", "compute something else than at the"),
        ("{looks: [3, 5, 7]}", "[0, 1, 2]", "s.yaml:11:8: seeds was another when claims were tested, and the error holds"),
        pytest.param(
            "seeds:", "tune: {training.learning_rate: [1e-3, 2e-3, 4e-3], seeds: [100]}\nseeds:",
            "s.yaml:11:7: tune was another when claims were tested, and the error holds",
            marks=needs("tuning"),
        ),
    ],
)  # fmt: skip
def test_a_changed_declaration_is_refused_after_the_first_look(driven, old, new, message):
    folder, _ = driven
    sweep = load_looks(folder, LOOKS.replace(old, new))
    with pytest.raises(SpecError) as caught:
        plan_stage(sweep, Store(folder / "runs"), identify=identify)
    assert message in str(caught.value)
    renamed = load_looks(folder, f"name: anew\n{LOOKS.replace(old, new)}")
    assert plan_stage(renamed, Store(folder / "runs"), identify=identify).plan.trials


def test_cells_that_others_start_from_are_trained_at_the_same_seeds(tmp_path, store):
    text = LOOKS.replace(
        "{model.n_kv_head: 1}", "{model.n_kv_head: 1, training.init_from: {heads: gqa}}"
    ).replace("    mqa:", "    gqa: {training.learning_rate: 1e-4}\n    mqa:")
    text = text.replace("[3, 5, 7]", "[2, 5, 8]") + "decide: {claims: [heads=mqa]}\n"
    drive_looks(load_looks(tmp_path, text), store)
    seeds, _ = read_decisions(store)
    assert seeds["gqa learned"] == seeds["mqa learned"] == seeds["mha learned"] == 5
    assert seeds["mha rope"] == 2


def test_a_level_that_diverged_is_given_up_instead_of_called_better(tmp_path, store):
    """At -0.3 the better level would be called at the second look."""
    sweep = load_looks(tmp_path, LOOKS.replace("seeds:", "baseline: {heads: mqa}\nseeds:"))
    planned = plan_stage(sweep, store, identify=identify).plan
    bad = [p for p in planned.trials if p.levels["heads"] == "mha" and p.trial.seed == 2]
    drive_looks(sweep, store, script={(bad[0].trial.id, "train", 3): "diverge"})
    _, taken = read_decisions(store)
    states = [look["states"]["heads=mha"] for look in taken]
    assert states[0]["sizes"] == [2]
    assert [state["outcome"] for state in states] == [""] * len(states)
    assert not states[1]["is_open"]
    assert states[1]["value"] < -0.25
