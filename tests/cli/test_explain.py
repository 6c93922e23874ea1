"""`kvlab explain`: its numbers computed again; `golden_errors/answers.txt` has what it prints."""

import hashlib
import json

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.store import Store
from tests.support.record_factory import FACTORS, Record, ServedRecord
from tests.support.stub_trials import StubRun, tiny_plan

SEEDS = (0, 1, 2, 3)
NAMES = ("heads", "position", "sharing")
RECORD = ServedRecord(factors={name: FACTORS[name] for name in NAMES}, seeds=SEEDS)


def read_losses(record=RECORD):
    """Return one row a trial: its levels, seed, id and loss as served."""
    pairs = [(one, s) for one in record.cells() for s in record.seeds]
    rows = [
        {**one, "seed": s, "trial": record.trial(one, s)}
        | {"loss": record.measurements(one, s)["loss_served"]}
        for one, s in pairs
        if record.status(one, s) == "done"
    ]
    return pd.DataFrame(rows)


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


def test_a_level_is_the_mean_over_the_settings_served_as_trained(explain, runs):
    table = read_losses().query("sharing != 'tied'")
    wide = table.pivot(index=["seed", "position", "sharing"], columns="heads", values="loss")
    by_seed = (wide["mqa"] - wide["mha"]).groupby("seed").mean()
    own_error = by_seed.std(ddof=1) / np.sqrt(len(SEEDS))
    (facts,) = json.loads(explain("made", "heads=mqa", "--json"))
    (effect,) = facts["effects"]
    assert effect["value"] == effect["computed"] == pytest.approx(by_seed.mean(), abs=1e-12)
    assert [one["difference"] for one in effect["by_seed"]] == pytest.approx(list(by_seed))
    assert effect["own_error"] == pytest.approx(own_error)
    assert effect["error"]["value"] >= own_error * (1 - 1e-9)
    terms = pd.DataFrame(effect["terms"])
    assert set(terms["trial"]) == set(table["trial"]) == {t["trial"] for t in facts["trials"]}
    assert (terms["weight"] * terms["value"]).sum() / len(SEEDS) == pytest.approx(by_seed.mean())
    low, high = effect["interval"]
    assert low < by_seed.mean() < high
    ends = explain("heads=mqa").partition("95% interval = ")[2].partition(", for all levels")[0]
    report = render_markdown(make_document(Study.load(Store(runs), "made")))
    assert f"| {ends} | **{effect['verdict']}** |" in report


def test_a_cell_beside_its_reference(explain, runs):
    wide = read_losses().query("sharing == 'none' and position == 'rope'")
    wide = wide.pivot(index="seed", columns="heads", values="loss")
    differences = wide["mqa"] - wide["mha"]
    (facts,) = json.loads(explain("mqa+rope", "--json"))
    assert [one["value"] for one in facts["values"]] == pytest.approx(list(wide["mqa"]))
    assert facts["mean"] == pytest.approx(wide["mqa"].mean())
    assert facts["standard_deviation"] == pytest.approx(wide["mqa"].std(ddof=1))
    found, study = facts["comparison"], Study.load(Store(runs), "made")
    assert found["value"] == found["computed"] == pytest.approx(differences.mean())
    assert found["own_error"] == pytest.approx(differences.sem())
    compared = study.comparisons["mqa", "rope", "none"]
    assert found["interval"] == [compared.low, compared.high]
    assert (found["verdict"], found["error"]["df"]) == (compared.verdict, compared.estimate.df)
    out = explain("mqa+rope")
    assert explain("position=rope, heads=mqa") == explain("made", "mqa,rope") == out
    assert "no cell or level of made" in explain("mha,mqa", code=2), "two levels of one factor"


class HexRecord(Record):
    """A level whose name is the beginning of an id, and another that begins several."""

    def trial(self, levels, seed):
        found = super().trial(levels, seed)
        if levels["heads"] == "mha":
            return f"4e3{seed}{found[4:]}"
        return f"c{found[1:]}"


def test_ids_are_tried_first(explain, tmp_path):
    record = HexRecord(factors={"heads": ("mha", "4e30", "4e")}, seeds=(0, 1))
    store = record.write(tmp_path / "runs").path
    trial = record.trial({"heads": "mha"}, 0)
    assert explain("4e30", store=store).startswith(f"trial {trial}: done; made: baseline seed=0")
    assert explain("4E30", store=store) == explain(trial, store=store)
    assert "level heads=4e30 of sweep made" in explain("heads=4e30", store=store)
    assert "cell 4e of sweep made: 2 trials" in explain("4e", store=store), "it fits two trials"
    err = explain("4e3", store=store, code=2)
    assert f"4e3 fits 2 trials ({trial}, " in err
    assert "give more digits" in err
    assert "give the cell or the level of its row" in explain("2.4119", store=store, code=2)


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
