"""`kvlab explain`; `answers.txt` and `errors.txt` have its text."""

import hashlib
import json

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.store import Store
from tests.support.record_factory import FACTORS, ServedRecord
from tests.support.stub_trials import StubRun, tiny_plan

SEEDS = (0, 1, 2, 3)
NAMES = ("heads", "position", "sharing")
RECORD = ServedRecord(factors={name: FACTORS[name] for name in NAMES}, seeds=SEEDS)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return RECORD.write(tmp_path_factory.mktemp("explained") / "runs").path


@pytest.fixture
def explain(runs, capsys):
    def run(*words, code=0, store=runs):
        capsys.readouterr()
        assert main(["explain", "--store", str(store), *words]) == code
        out, err = capsys.readouterr()
        return out or err

    return run


def test_a_cell_has_several_names_and_the_interval_of_the_report(explain, runs):
    (facts,) = json.loads(explain("mqa+rope", "--json"))
    found, study = facts["comparison"], Study.load(Store(runs), "made")
    compared, metric = study.comparisons["mqa", "rope", "none"], study.primary_metric
    assert found["interval"] == [compared.low, compared.high]
    assert found["computed"] == pytest.approx(compared.value, abs=1e-12)
    assert (found["verdict"], found["error"]["df"]) == (compared.verdict, compared.estimate.df)
    assert facts["values"] == [
        {"seed": row.seed, "trial": row.trial, "status": "done", "value": row.measurements[metric]}
        for row in study.cells["mqa", "rope", "none"].values()
    ]
    out = explain("mqa+rope")
    assert explain("position=rope, heads=mqa") == explain("made", "mqa,rope") == out
    assert "no cell or level of made" in explain("mha,mqa", code=2), "two levels of one factor"
    (effect,) = json.loads(explain("heads=mqa", "--json"))[0]["effects"]
    assert effect["computed"] == pytest.approx(effect["value"], abs=1e-12)
    ends = explain("heads=mqa").partition("95% interval = ")[2].partition(", for all levels")[0]
    assert f"| {ends} | **{effect['verdict']}** |" in render_markdown(make_document(study))


def test_a_trial_and_its_damage(tmp_path, capsys):
    store = Store(tmp_path / "runs")
    StubRun(store.path)(tiny_plan(tmp_path).trials[0].trial)
    (trial,) = store.trial_ids()
    weights = store.training_directory(store.result(trial)["training"]) / "final/model.safetensors"
    path = store.sweep_directory("broken") / "sweep.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    command = ["explain", trial[:6], "--store", str(store.path)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "broken is left out: " in err
    assert f"trial {trial}: done" in out
    assert f"folder    {store.attempt_directory(trial, 1)}" in out
    assert f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  trainings/" in out
    weights.write_bytes(b"other" + weights.read_bytes()[5:])
    assert main(command) == 1
    assert "DAMAGED   trainings/" in capsys.readouterr().out
    result = store.trial_directory(trial) / "result.json"
    result.write_bytes(result.read_bytes()[:-9])
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "cached    no: its result is not what was written" in out
    assert f"DAMAGED   trials/{trial}/result.json: it does not end with its sha256" in out
