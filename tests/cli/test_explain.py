"""`kvlab explain`: what a trial, a cell or a level is computed from, and where its files are."""

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
from tests.support.record_factory import Record
from tests.support.stub_trials import StubRun, tiny_plan

SEEDS = (0, 1, 2, 3)


class ServedRecord(Record):
    """Tied cells have the weights of untied ones, and are served otherwise; rope saves no byte."""

    def description(self, cells):
        found = super().description(cells)
        found["patches"]["sharing"]["tied"] = {"serving.tie": "adjacent:2"}
        return found


FACTORS = {
    "heads": ("mha", "mqa"),
    "position": ("learned", "rope"),
    "sharing": ("none", "trained", "tied"),
}
RECORD = ServedRecord(factors=FACTORS, seeds=SEEDS)


def read_losses(record=RECORD):
    """Return one row a trial: its levels, seed, id and loss as served."""
    rows = [
        {
            **levels,
            "seed": seed,
            "trial": record.trial(levels, seed),
            "loss": record.measurements(levels, seed)["loss_served"],
        }
        for levels in record.cells()
        for seed in record.seeds
        if record.status(levels, seed) == "done"
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
    assert effect["computed"] == pytest.approx(by_seed.mean(), abs=1e-12)
    assert effect["value"] == pytest.approx(by_seed.mean(), abs=1e-12)
    assert [one["difference"] for one in effect["by_seed"]] == pytest.approx(list(by_seed))
    assert effect["own_error"] == pytest.approx(own_error)
    terms = pd.DataFrame(effect["terms"])
    assert set(terms["trial"]) == set(table["trial"]) == {t["trial"] for t in facts["trials"]}
    assert (terms["weight"] * terms["value"]).sum() / len(SEEDS) == pytest.approx(by_seed.mean())
    assert set(terms["weight"]) == {0.25, -0.25}
    left_out = {one["cell"]: one["left_out"] for one in effect["settings"] if one["left_out"]}
    assert left_out == dict.fromkeys(
        ("mqa+tied", "mqa+rope+tied"), "served otherwise than it was trained"
    )
    assert effect["error"]["value"] >= own_error * (1 - 1e-9)
    low, high = effect["interval"]
    assert low < by_seed.mean() < high
    out = explain("heads=mqa")
    assert f"mean over 4 seeds = {by_seed.mean():.8g} nats/token" in out
    ends = out.partition("95% interval = ")[2].partition(", for all levels together")[0]
    report = render_markdown(make_document(Study.load(Store(runs), "made")))
    assert f"| {ends} | **{effect['verdict']}** |" in report


def test_settings_of_a_level_of_serving_are_explained_apart(explain):
    wide = read_losses().pivot(
        index=["heads", "position", "seed"], columns="sharing", values="loss"
    )
    expected = (wide["tied"] - wide["none"]).groupby(["heads", "position"]).mean()
    (facts,) = json.loads(explain("sharing=tied", "--json"))
    assert [one["computed"] for one in facts["effects"]] == pytest.approx(list(expected))
    assert all(len(one["terms"]) == 2 * len(SEEDS) for one in facts["effects"])
    titles = [one["title"] for one in facts["effects"]]
    assert titles[1] == "effect of sharing=tied at heads=mha, position=rope against sharing=none"
    assert "a level of serving: each setting against the same weights" in explain("sharing=tied")


def test_a_cell_beside_its_reference(explain, runs):
    wide = read_losses().query("sharing == 'none' and position == 'rope'")
    wide = wide.pivot(index="seed", columns="heads", values="loss")
    differences = wide["mqa"] - wide["mha"]
    (facts,) = json.loads(explain("mqa+rope", "--json"))
    assert [one["value"] for one in facts["values"]] == pytest.approx(list(wide["mqa"]))
    assert facts["mean"] == pytest.approx(wide["mqa"].mean())
    assert facts["standard_deviation"] == pytest.approx(wide["mqa"].std(ddof=1))
    found = facts["comparison"]
    assert found["title"] == "mqa+rope minus rope"
    assert found["value"] == found["computed"] == pytest.approx(differences.mean())
    assert found["own_error"] == pytest.approx(differences.sem())
    study = Study.load(Store(runs), "made")
    compared = study.comparisons["mqa", "rope", "none"]
    assert found["interval"] == [compared.low, compared.high]
    assert (found["verdict"], found["error"]["df"]) == (compared.verdict, compared.estimate.df)
    out = explain("mqa+rope")
    assert "its reference is rope, as position=rope saves no byte" in out
    assert "it stores 4 times less K/V than its reference" in out
    assert "heads=mqa sets model.heads: mqa" in out
    assert explain("position=rope, heads=mqa") == explain("made", "mqa,rope") == out
    assert "no cell or level of made" in explain("mha,mqa", code=2), "two levels of one factor"
    assert "other cells are compared with it" in explain("baseline")
    assert json.loads(explain("rope", "--json"))[0]["comparison"] is None


def test_a_contrast_is_a_weighted_sum_of_all_cells(explain, tmp_path):
    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope"), "mlp": ("gelu", "swiglu")}

    def exclude(levels):  # half of the design: an even number of levels that are not the baseline's
        return sum(levels[name] != own[0] for name, own in factors.items()) % 2 == 1

    record = Record(factors=factors, seeds=SEEDS, exclude=exclude)
    store = record.write(tmp_path / "runs").path
    means = read_losses(record).groupby("heads")["loss"].mean()
    (facts,) = json.loads(explain("heads=mqa", "--json", store=store))
    (effect,) = facts["effects"]
    assert effect["computed"] == pytest.approx(means["mqa"] - means["mha"], abs=1e-12)
    assert len(effect["terms"]) == len(SEEDS) * 4
    out = explain("heads=mqa", store=store)
    assert "a weighted sum of all cells" in out
    assert "aliased with position=rope and mlp=swiglu" in out


def test_a_diverged_training_is_left_out_and_cached(explain, tmp_path):
    def status(levels, seed):
        is_lost = (levels["heads"], levels["position"], seed) == ("mqa", "rope", 1)
        return "diverged" if is_lost else "done"

    record = Record(factors={**FACTORS, "sharing": ("none",)}, seeds=SEEDS, status=status)
    store = record.write(tmp_path / "runs").path
    table = read_losses(record).query("position == 'learned'")
    means = table.groupby("heads")["loss"].mean()
    (facts,) = json.loads(explain("heads=mqa", "--json", store=store))
    (effect,) = facts["effects"]
    assert effect["computed"] == pytest.approx(means["mqa"] - means["mha"])
    assert effect["settings"][1]["left_out"] == "a training of mqa+rope diverged"
    assert "seed 1: diverged" in explain("mqa+rope", store=store)
    levels = {"heads": "mqa", "position": "rope", "sharing": "none"}
    assert "cached    yes: it is not run again" in explain(record.trial(levels, 1), store=store)


def test_a_trial_names_its_cell_its_making_and_what_it_recorded(explain):
    levels = {"heads": "mqa", "position": "learned", "sharing": "tied"}
    trial = RECORD.trial(levels, 1)
    (facts,) = json.loads(explain(trial[:8], "--json"))
    assert facts["trial"] == trial
    assert facts["measurements"].items() >= RECORD.measurements(levels, 1).items()
    (cell,) = facts["cells"]
    assert (cell["cell"], cell["levels"], cell["seed"]) == ("mqa+tied", levels, 1)
    assert facts["same_weights"] == [RECORD.trial({**levels, "sharing": "none"}, 1)]
    assert facts["command"] == "kvlab submit sweeps/made.yaml"
    assert facts["code"].startswith("commit 0123456789abcdef")
    assert "torch 2.11.0" in facts["versions"]
    assert f"digest {'e' * 64}" in facts["text"]
    out = explain("made", trial[:8])
    assert f"trial {trial}: done; made: mqa+tied seed=1" in out
    assert "cached    yes: a sweep that asks for this trial takes its result" in out
    assert "sharing=tied sets serving.tie: adjacent:2" in out


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


def test_a_trial_that_has_not_run(explain, tmp_path):
    record = Record(
        factors={"heads": ("mha", "mqa")}, seeds=(0, 1),
        status=lambda _, seed: "done" if seed == 0 else "missing",
    )  # fmt: skip
    store = record.write(tmp_path / "runs").path
    out = explain(record.trial({"heads": "mqa"}, 1), store=store)
    assert "not ended; made: mqa seed=1" in out
    assert "cached    no: it has no result yet" in out
    assert "seed 1: missing" in explain("mqa", store=store)
    assert "one seed: not tested" in explain("heads=mqa", store=store)


class MoreOfTheBaseline(Record):
    """As `designs: {one_factor: 4, baseline: 12}`, with seeds that explain nothing."""

    def description(self, cells):
        found = super().description(cells)
        for cell in found["cells"]:
            if cell["levels"]["heads"] != "mha":
                cell["trials"] = {s: trial for s, trial in cell["trials"].items() if int(s) < 4}
        return found


def test_seeds_of_the_baseline_alone_enter_a_level_and_its_cell(explain, tmp_path):
    factors = {"heads": ("mha", "gqa", "mqa", "one")}
    record = MoreOfTheBaseline(factors=factors, seeds=tuple(range(12)), seed_noise=0.0, noise=0.02)
    store = record.write(tmp_path / "runs").path
    losses = {
        heads: [record.measurements({"heads": heads}, s)["loss_served"] for s in range(count)]
        for heads, count in (("mha", 12), ("mqa", 4))
    }
    expected = np.mean(losses["mqa"]) - np.mean(losses["mha"])
    paired = np.mean(losses["mqa"]) - np.mean(losses["mha"][:4])
    assert abs(expected - paired) > 1e-4
    (level,) = json.loads(explain("made", "heads=mqa", "--json", store=store))
    (cell,) = json.loads(explain("made", "mqa", "--json", store=store))
    for one in (level["effects"][0], cell["comparison"]):
        assert one["value"] == pytest.approx(expected, abs=1e-12)
        assert one["over_all_seeds"] == pytest.approx(expected, abs=1e-12)
        assert one["computed"] == pytest.approx(paired, abs=1e-12)
    text = explain("made", "heads=mqa", store=store)
    assert "the report has another difference" not in text
