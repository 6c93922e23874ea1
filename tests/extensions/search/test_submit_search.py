"""`kvlab submit` of a search: with pruning, and on a cluster that does not share the store."""

import json
import re
from dataclasses import replace

import pytest

from kvlab.store import Store
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.extensions import needs
from tests.support.tiny_sweep import run_kvlab, tiny_sweep_folder

PRUNING_SEARCH = """\
question: Which learning rate?
experiment: e.yaml
search:
  choices: {model.n_kv_head: [1, 2]}
  ranges: {training.learning_rate: {low: 1e-5, high: 1e-1, log: true}}
  objectives: [loss, kv_bytes]
  pruning: {rule: halving, factor: 2, first: 0.3}
  trials: 6
  seed: 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with tiny_sweep_folder(
        tmp_path_factory.mktemp("pruned"), PRUNING_SEARCH, publishes=True
    ) as folder:
        yield folder


@pytest.fixture(scope="module")
def submitted(folder):  # noqa: ARG001
    return run_kvlab("submit", "s.yaml", "--executor", "inline")


@pytest.fixture(scope="module")
def store(folder, submitted):  # noqa: ARG001
    return Store(folder / "runs")


def pruned(store):
    return [trial for trial in store.sweep_trials("s") if store.status(trial) == "pruned"]


def test_the_search_succeeds_and_counts_pruned_trials(submitted, store):
    code, out, error = submitted
    assert (code, error) == (0, "")
    count = len(pruned(store))
    assert count > 0
    assert f"{7 - count} done, 0 failed, {count} pruned in" in out
    assert f"search: 6 trials of 6 suggestions, {count} pruned" in out
    assert "kvlab report s --confirm s-confirm.yaml" in out
    pattern = r"^best    (\w{8}) n_kv_head=\d learning_rate=\S+  loss .*, kv_bytes"
    best = re.search(pattern, out, re.M)
    assert f"started {best[1]} n_kv_head=" in out
    assert "point=" not in out
    assert best[0] in run_kvlab("status", "s")[1]
    state = json.loads(run_kvlab("status", "s", "--json")[1])
    assert state["states"] == {"done": 7 - count, "pruned": count}
    shown = [one for one in state["trials"] if one["state"] == "pruned"]
    result = store.result(shown[0]["trial"])
    facts = result["pruned"]
    assert facts["step"] == 5
    assert shown[0]["detail"] == f"validation loss {facts['loss']:.4f} after step 5 of 10"
    assert result["curves"]["validation_loss"] == [[5, 320, facts["loss"]]]


def test_the_report_lists_pruned_trials_without_counting_them(folder, store):
    rows = map(json.loads, (folder / "reports/s/results.jsonl").read_text().splitlines())
    listed = {row["trial"] for row in rows if row["status"] == "pruned"}
    assert listed == set(pruned(store))
    text = (folder / "reports/s/report.md").read_text()
    assert f"of 6 suggestions: {len(pruned(store))} pruned." in text
    assert "This report is partial" not in text
    assert "more than one attempt" not in text  # a pause is no failure
    points = store.search_points("s").read()
    assert {one["trial"] for one in points if one["past"]["values"]}.isdisjoint(listed)


def test_other_commands_know_a_search(folder, store):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("s").experiment_id
    runs = {run.data.tags.get("kvlab.trial"): run for run in client.search_runs([experiment])}
    for trial in pruned(store):
        loss = store.result(trial)["pruned"]["loss"]
        assert runs[trial].info.status == "KILLED"
        assert runs[trial].data.metrics["train/validation_loss"] == pytest.approx(loss)
    parent = client.search_runs([experiment], "tags.`kvlab.key` = 'parent'")[0]
    assert parent.info.status == "FINISHED"
    rungs = "Pruned by validation loss, whatever the objectives: halving at 0.5 of the steps."
    assert rungs in run_kvlab("plan", "s.yaml")[1]
    assert run_kvlab("report", "s", "--confirm", "s-confirm.yaml")[0] == 0
    text = (folder / "s-confirm.yaml").read_text()
    assert text in (folder / "reports/s/report.md").read_text()
    assert run_kvlab("plan", "s-confirm.yaml")[0] == 0
    done = next(t for t in store.sweep_trials("s") if store.status(t) == "done")
    code, _, error = run_kvlab("submit", "s.yaml", "--executor", "inline", "--promote", done)
    assert (code, "is no pruned trial of s" in error) == (2, True)


def test_a_promoted_trial_equals_an_uninterrupted_one_bitwise(folder, store):
    trial = pruned(store)[0]
    facts = store.result(trial)["experiment"]
    heads, rate = facts["model"]["n_kv_head"], facts["training"]["learning_rate"]
    (folder / "g.yaml").write_text(
        "question: q\nexperiment: e.yaml\nfactors:\n  a:\n"
        f"    b: {{model.n_kv_head: {heads}, training.learning_rate: {rate!r}}}\n"
    )
    options = ("--executor", "inline", "--no-report", "--tracking-uri", "sqlite:///other.db")
    assert run_kvlab("submit", "g.yaml", "--store", "whole", *options)[0] == 0
    code, out, _ = run_kvlab("submit", "s.yaml", "--promote", trial[:8], *options)
    assert code == 0
    assert f"done    {trial[:8]}" in out
    whole = Store(folder / "whole")
    ours, theirs = store.result(trial), whole.result(trial)
    training = ours["training"]
    for name in ("train_loss", "validation_loss"):
        assert ours["curves"][name] == theirs["curves"][name]
    assert ours["measurements"]["loss"] == theirs["measurements"]["loss"]
    one, other = (s.training_directory(training) / "final" for s in (store, whole))
    weights = "model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()
    assert ours["provenance"]["attempts"] - ours["provenance"]["pauses"] == 1


@needs("gc")
def test_gc_removes_pruned_checkpoints_only_with_its_option(store):
    trial = pruned(store)[-1]
    folder = store.training_directory(store.result(trial)["training"]) / "checkpoints"
    assert run_kvlab("gc", "--apply")[0] == 0
    assert any(folder.iterdir())
    code, out, _ = run_kvlab("gc", "--apply", "--pruned")
    assert code == 0
    assert "a training that a search has pruned" in out
    assert not folder.exists()


SEARCH = """\
question: Which learning rate?
experiment: e.yaml
search:
  ranges: {training.learning_rate: {low: 1e-4, high: 1e-1, log: true}}
  objectives: [loss]
  trials: %d
"""


class UnsharedCluster(InlineExecutor):
    """A cluster of one machine that does not see the driver's folders."""

    def run_on_all_machines(self, task, argument):
        return {"far": task(argument.replace("runs", "nowhere"))}


def test_the_store_is_tested_also_when_the_base_is_done(tmp_path, monkeypatch):
    with tiny_sweep_folder(tmp_path, SEARCH % 1) as folder:
        code, out, _ = run_kvlab("submit", "s.yaml", "--executor", "inline", "--no-report")
        assert code == 0
        assert "0 ended before, 1 to run and what the search suggests on this process" in out
        (folder / "s.yaml").write_text(SEARCH % 2)
        far = replace(EXECUTORS["ray"], make=lambda run, _: UnsharedCluster(run))
        monkeypatch.setitem(EXECUTORS, "ray", far)
        before = sorted(folder.glob("runs/trials/*"))
        code, out, error = run_kvlab("submit", "s.yaml", "--address", "far:6379", "--no-report")
        assert (code, "nothing is missing" in out) == (2, False)
        assert "is not shared by 1 of 1 machines of the cluster: far has no" in error
        assert sorted(folder.glob("runs/trials/*")) == before


@pytest.mark.usefixtures("submitted")
def test_a_share_of_a_gpu_that_is_measured_is_refused_before_anything_starts(folder):
    experiment = (folder / "e.yaml").read_text()
    (folder / "auto.yaml").write_text(f"{experiment}\nresources: {{gpus: auto}}\n")
    search = PRUNING_SEARCH.replace("e.yaml", "auto.yaml")
    (folder / "auto-search.yaml").write_text(search)
    code, _, error = run_kvlab("plan", "auto-search.yaml")
    assert code == 2
    assert re.match(r"auto.yaml:\d+:19: resources.gpus = auto is measured before trials", error)
