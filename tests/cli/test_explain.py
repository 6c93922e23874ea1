"""`kvlab explain`: from a number, a cell or a trial to its trials, files and making."""

import hashlib
import json

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.report.formatting import format_difference, format_metric
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document, results_jsonl
from kvlab.store import Store
from tests.support.record_factory import Record
from tests.support.stub_trials import StubRun, tiny_plan

SEEDS = (0, 1, 2)
RECORD = Record(factors={"heads": ("mha", "mqa"), "sharing": ("none", "tied")}, seeds=SEEDS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    study = Study.load(RECORD.write(folder / "runs"), "made")
    report = folder / "reports" / "made"
    report.mkdir(parents=True)
    (report / "report.md").write_text(render_markdown(make_document(study)))
    (report / "results.jsonl").write_text(results_jsonl(study))
    return folder / "runs"


@pytest.fixture
def explain(runs, capsys):
    def run(*words, code=0):
        capsys.readouterr()
        assert main(["explain", "--store", str(runs), *words]) == code
        out, err = capsys.readouterr()
        return out or err

    return run


def losses(heads, sharing, metric="loss_served"):
    levels = {"heads": heads, "sharing": sharing}
    return [RECORD.measurements(levels, seed)[metric] for seed in SEEDS]


def test_an_effect_is_computed_again_from_its_pairs(explain):
    pairs = [losses("mqa", "none"), losses("mha", "none")]
    gaps = [losses("mqa", "tied"), losses("mha", "tied")]
    by_seed = [
        ((a - b) + (c - d)) / 2 for a, b, c, d in zip(*pairs, *gaps, strict=True)
    ]  # settings none and tied share their trainings
    effect = sum(by_seed) / len(by_seed)
    text = format_difference("loss_served", effect)
    facts = json.loads(explain(text, "--json"))
    title = "effect of heads=mqa on the validation loss through the serving cache (loss_served)"
    (found,) = (one for one in facts["quantities"] if one["title"] == title)
    assert found["recomputed"] == pytest.approx(effect, abs=1e-12)
    assert found["value"] == pytest.approx(effect, abs=1e-12)
    assert len(found["terms"]) == 12
    assert any(place.startswith("Table") and "(effects)" in place for place in found["places"])
    number = facts["quantities"].index(found) + 1
    out = explain(text, "--pick", str(number))
    assert "the trial with heads=mqa minus its partner with mha" in out
    for seed, value in zip(SEEDS, by_seed, strict=True):
        assert f"seed {seed}: sum of weight x difference = {value:+.8g}" in out
    assert f"mean over 3 seeds = {effect:.8g} nats/token" in out


def test_a_mean_names_its_trials_and_their_making(explain):
    values = losses("mqa", "tied")
    mean = sum(values) / len(values)
    facts = json.loads(explain(format_metric("loss_served", mean), "nats/token", "--json"))
    (found,) = (one for one in facts["quantities"] if "loss_served" in one["title"])
    levels = {"heads": "mqa", "sharing": "tied"}
    assert [term["trial"] for term in found["terms"]] == [RECORD.trial(levels, s) for s in SEEDS]
    assert [term["value"] for term in found["terms"]] == pytest.approx(values)
    trial = facts["trials"][found["terms"][0]["trial"]]
    assert trial["command"] == "kvlab submit sweeps/made.yaml"
    assert trial["code"].startswith("commit 0123456789abcdef")
    assert "torch 2.11.0" in trial["versions"]
    assert trial["machine"] == "cpu, 1 thread, platform not recorded"
    assert f"digest {'e' * 64}" in trial["text"]


def test_one_number_of_a_trial_is_the_most_specific(explain):
    levels = {"heads": "mqa", "sharing": "none"}
    out = explain(f"{losses('mqa', 'none')[1]:.12g}")
    assert "(loss) of mqa at seed 1" in out
    assert "; equal: loss_served" in out
    assert RECORD.trial(levels, 1)[:8] in out


@pytest.mark.parametrize("words", [("262,144", "B"), ("256 KiB",), ("0.2621 MB",)])
def test_bytes_in_any_unit(explain, words):
    out = explain(*words)
    assert "(kv_bytes_formula) of mqa at seeds 0, 1, 2" in out
    assert "262144 bytes" in out


def test_several_quantities_are_counted_and_picked(explain):
    values = losses("mqa", "none")
    text = format_metric("loss", sum(values) / len(values))
    facts = json.loads(explain(text, "--json"))
    count = len(facts["quantities"])
    assert count > 1
    out = explain(text, "--pick", str(count))
    assert f"{text} is printed for {count} quantities" in out
    assert f"Quantity {count}: " in out
    assert f"--pick = {count + 1}" in explain(text, "--pick", str(count + 1), code=2)


def test_nothing_found_names_the_nearest(explain):
    err = explain("3.1234567", code=2)
    assert "3.1234567 is not in the record" in err
    assert "values and the report's text of made were searched" in err
    assert "nearest:" in err


def test_a_report_that_the_record_no_longer_gives(explain, runs, tmp_path):
    folder = runs.parent / "reports" / "made"
    out = explain("4.00x", "--report", str(folder))
    assert "report.md of made: the number stands on lines" in out
    assert "its results.jsonl is what the record gives now" in out
    edited = tmp_path / "made"
    edited.mkdir()
    for name in ("report.md", "results.jsonl"):
        (edited / name).write_text((folder / name).read_text().replace("4.0", "3.9"))
    assert "is NOT what the record gives now" in explain("4.00x", "--report", str(edited))
    assert "is not in the folder of a report" in explain("4", "--report", "/", code=2)
    assert "leave one of them out" in explain("4", "--report", str(folder), "--sweep", "x", code=2)


def test_cells_by_name(explain):
    out = explain("mqa+tied")
    assert "cell mqa+tied of sweep made: heads=mqa, sharing=tied; 3 trials" in out
    assert explain("sharing=tied, heads=mqa") == out
    assert "heads=mha, sharing=none" in explain("baseline")
    assert "cells are baseline, tied, mqa, mqa+tied" in explain("nosuch", code=2)
    assert "did you mean mqa+tied?" in explain("mqa+tide", code=2)
    assert "--pick is for numbers" in explain("baseline", "--pick", "2", code=2)


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
    assert f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  trainings/" in out
    weights.write_bytes(b"other" + weights.read_bytes()[5:])
    assert main(command) == 1
    assert "DAMAGED   trainings/" in capsys.readouterr().out
    result = store.trial_directory(trial) / "result.json"
    result.write_bytes(result.read_bytes()[:-9])
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "origin    not recorded, as there is no whole result" in out
    assert f"DAMAGED   trials/{trial}/result.json: it does not end with its sha256" in out


def test_what_is_damaged_is_said_where_a_number_is_gone(tmp_path, capsys):
    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    store = record.write(tmp_path / "runs")
    path = store.trial_directory(record.trial({"heads": "mqa"}, 0)) / "result.json"
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    loss = record.measurements({"heads": "mqa"}, 0)["loss"]
    assert main(["explain", str(loss), "--store", str(store.path)]) == 2
    assert "1 trial left out as damaged, which `kvlab verify` names" in capsys.readouterr().err


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys):
    record = Record(factors={"heads": ("mha", "mqa\x1b[31m\u202e")}, seeds=(0, 1))
    record.write(tmp_path / "runs")
    for words in (["4.00x"], ["baseline"], ["9.99999"], ["nosuch"]):
        main(["explain", *words, "--store", str(tmp_path / "runs")])
        out, err = capsys.readouterr()
        assert not {"\x1b", "\u202e"} & set(out + err)
