"""MLflow beside a running sweep."""

import pytest
from mlflow import MlflowClient

from kvlab.cli.sweep_callbacks import MLflowCallback
from tests.support.record_factory import Record

FACTORS = {"heads": ("mha", "mqa")}


@pytest.fixture
def store(tmp_path):
    return Record(factors=FACTORS, seeds=(0, 1)).write(tmp_path / "runs")


def runs(store):
    """Trial ids of the runs in MLflow, and the status of their parent."""
    client = MlflowClient(f"sqlite:///{store.path}/mlflow.db")
    experiment = client.get_experiment_by_name("made").experiment_id
    found = client.search_runs([experiment])
    trials = sorted(run.data.tags["kvlab.trial"] for run in found if "kvlab.trial" in run.data.tags)
    status = [run.info.status for run in found if "kvlab.trial" not in run.data.tags]
    return trials, status


def test_mlflow_shows_results_while_the_sweep_runs(store):
    trials, warned = store.sweep_trials("made"), []
    later = {trial: store.trial_directory(trial) / "result.json" for trial in trials[1:]}
    hidden = {path: path.read_bytes() for path in later.values()}
    for path in hidden:
        path.unlink()
    mirror = MLflowCallback(store, "made", None, warned.append)
    with store.driver_lock("made").hold():
        mirror.on_result(trials[0])
        assert runs(store) == (trials[:1], ["RUNNING"])
        for number, (trial, path) in enumerate(later.items(), 2):
            path.write_bytes(hidden[path])
            mirror.on_result(trial)
            assert runs(store)[0] == sorted(trials[:number])
    assert mirror.finish(None) == {"uri": f"sqlite:///{store.path}/mlflow.db", "error": None}
    assert runs(store) == (sorted(trials), ["FINISHED"])
    assert warned == []


def test_mlflow_shows_a_stopped_sweep_as_killed(store):
    trials = store.sweep_trials("made")
    (store.trial_directory(trials[-1]) / "result.json").unlink()
    mirror = MLflowCallback(store, "made", None, pytest.fail)
    with store.driver_lock("made").hold():
        mirror.on_result(trials[0])
        assert runs(store)[1] == ["RUNNING"]
    mirror.finish(None)
    assert runs(store) == (sorted(trials[:-1]), ["KILLED"])
