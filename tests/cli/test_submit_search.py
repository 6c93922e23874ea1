"""A search that prunes, over real trainings, through the command line."""

import json

import pytest

from kvlab.store import Store
from tests.support.tiny_sweep import call, tiny_place

SEARCH = """\
question: Which learning rate?
experiment: e.yaml
search:
  choices:
    model.n_kv_head: [1, 2]
  ranges:
    training.learning_rate: {low: 1e-5, high: 1e-1, log: true}
  objectives: [loss, kv_bytes]
  pruning: {rule: halving, factor: 2, first: 0.3}
  trials: 6
  seed: 1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with tiny_place(tmp_path_factory.mktemp("pruned"), SEARCH) as folder:
        yield folder


@pytest.fixture(scope="module")
def submitted(place):  # noqa: ARG001
    return call("submit", "s.yaml", "--executor", "inline")


@pytest.fixture(scope="module")
def store(place, submitted):  # noqa: ARG001
    return Store(place / "runs")


def pruned(store):
    return [trial for trial in store.sweep_trials("s") if store.status(trial) == "pruned"]


def test_the_search_ends_well_and_says_what_it_pruned(submitted, store):
    code, out, error = submitted
    assert (code, error) == (0, "")
    count = len(pruned(store))
    assert count > 0
    assert f"{7 - count} done, 0 failed, {count} pruned in" in out
    assert f"search: 6 trials of 6 suggestions, {count} pruned" in out
    state = json.loads(call("status", "s", "--json")[1])
    assert state["states"] == {"done": 7 - count, "pruned": count}
    shown = [one for one in state["trials"] if one["state"] == "pruned"]
    result = store.result(shown[0]["trial"])
    facts = result["pruned"]
    assert facts["step"] == 5
    assert shown[0]["detail"] == f"validation loss {facts['loss']:.4f} after step 5 of 10"
    assert result["curves"]["validation_loss"] == [[5, 320, facts["loss"]]]


def test_the_report_tells_of_them_and_counts_none(place, store):
    rows = [
        json.loads(line) for line in (place / "reports/s/results.jsonl").read_text().splitlines()
    ]
    assert sorted(row["trial"] for row in rows if row["status"] == "pruned") == sorted(
        pruned(store)
    )
    text = (place / "reports/s/report.md").read_text()
    assert f"The search pruned {len(pruned(store))} trial" in text
    assert "This report is partial" not in text
    assert "more than one attempt" not in text  # a pause is no failure
    front = json.loads((place / "runs/sweeps/s/search.json").read_text())["points"]
    kept = [p for p in front if p["past"]["values"]]
    assert {p["trial"] for p in kept}.isdisjoint(pruned(store))


def test_mlflow_has_them_as_killed_runs(place, store):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("s").experiment_id
    runs = {run.data.tags.get("kvlab.trial"): run for run in client.search_runs([experiment])}
    for trial in pruned(store):
        assert runs[trial].info.status == "KILLED"
        assert runs[trial].data.metrics["validation_loss"] == pytest.approx(
            store.result(trial)["pruned"]["loss"]
        )
    assert client.search_runs([experiment], "tags.`kvlab.key` = 'parent'")[0].info.status == (
        "FINISHED"
    )


def test_promoted_by_hand_one_ends_bitwise_as_if_it_had_never_paused(place, store):
    trial = pruned(store)[0]
    facts = store.result(trial)["experiment"]
    heads, rate = facts["model"]["n_kv_head"], facts["training"]["learning_rate"]
    (place / "g.yaml").write_text(
        "question: q\nexperiment: e.yaml\nfactors:\n  a:\n"
        f"    b: {{model.n_kv_head: {heads}, training.learning_rate: {rate!r}}}\n"
    )
    options = ("--executor", "inline", "--no-report", "--tracking-uri", "sqlite:///other.db")
    assert call("submit", "g.yaml", "--store", "whole", *options)[0] == 0
    code, out, _ = call("submit", "s.yaml", "--promote", trial[:8], *options)
    assert code == 0
    assert f"done    {trial[:8]}" in out
    whole = Store(place / "whole")
    ours, theirs = store.result(trial), whole.result(trial)
    training = ours["training"]
    for name in ("train_loss", "validation_loss"):
        assert ours["curves"][name] == theirs["curves"][name]
    assert ours["measurements"]["loss"] == theirs["measurements"]["loss"]
    weights = [
        (one.training_directory(training) / "final" / "model.safetensors").read_bytes()
        for one in (store, whole)
    ]
    assert weights[0] == weights[1]
    assert ours["provenance"]["attempts"] - ours["provenance"]["pauses"] == 1


def test_a_promotion_that_means_nothing_is_refused(place, store):
    done = next(t for t in store.sweep_trials("s") if store.status(t) == "done")
    code, _, error = call("submit", "s.yaml", "--executor", "inline", "--promote", done)
    assert code == 2
    assert "is no pruned trial of s; see `kvlab status s`" in error
    (place / "f.yaml").write_text(
        "question: q\nexperiment: e.yaml\nfactors: {heads: {mha: {}, mqa: {model.n_kv_head: 1}}}\n"
    )
    code, _, error = call("submit", "f.yaml", "--promote", done)
    assert code == 2
    assert f"--promote = {done} needs a search with pruning, and f prunes nothing" in error


def test_gc_takes_pruned_checkpoints_only_when_asked(store):
    trial = pruned(store)[-1]
    folder = store.training_directory(store.result(trial)["training"]) / "checkpoints"
    assert call("gc", "--apply")[0] == 0
    assert any(folder.iterdir())
    code, out, _ = call("gc", "--apply", "--pruned")
    assert code == 0
    assert "a training that a search has pruned" in out
    assert not folder.exists()


def test_plan_tells_the_rungs(place):  # noqa: ARG001
    code, out, _ = call("plan", "s.yaml")
    assert code == 0
    assert "Pruned by validation loss, whatever the objectives: halving at 0.5 of the steps." in out
