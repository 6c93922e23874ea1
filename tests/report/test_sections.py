"""Sections: picked by a sweep, refused where they are not there, and new ones."""

import csv
import json
import math
import re
from pathlib import Path

import pytest

import kvlab.report
from kvlab.cli.main import main
from kvlab.cli.shared_arguments import read_sweep
from kvlab.errors import UsageError
from kvlab.report import write_report
from kvlab.report.sections import SECTIONS, SectionEntry
from kvlab.store.metrics import METRICS
from tests.support.record_factory import Record

HEADS = {"heads": ("mha", "mqa")}


def page_sections(folder: Path) -> list[str]:
    return re.findall(r'<section id="([a-z-]+)"', (folder / "report.html").read_text())


def test_a_sweep_picks_its_sections_and_their_order(tmp_path, capsys):
    store = Record(factors=HEADS).write(tmp_path / "store")
    sweep = store.sweep("made")
    asked = ["effects", "answer", "provenance"]
    store.write_sweep({**sweep, "report": {"sections": asked}})
    folder = write_report(store, "made", tmp_path)
    assert page_sections(folder) == asked
    assert "`kvlab report made`" in (folder / "report.md").read_text()
    assert {path.stem for path in (folder / "figures").iterdir()} == {"effects", "pareto"}

    command = ["report", "made", "--store", str(store.path), "--reports", str(tmp_path / "other")]
    assert main([*command, "--sections", "provenance,cells"]) == 0
    other = tmp_path / "other" / "made"
    assert page_sections(other) == ["provenance", "cells"]
    again = "`kvlab report made --sections provenance,cells`"
    assert again in (other / "report.md").read_text()
    for wrong, words in (("celss", "did you mean cells?"), ("cells,cells", "cells twice")):
        assert main([*command, "--sections", wrong]) == 2
        assert words in capsys.readouterr().err


def sweep_file(folder: Path, report: str) -> Path:
    experiments = Path(__file__).parents[2] / "experiments"
    path = folder / "heads.yaml"
    path.write_text(
        f"question: Why?\nexperiment: {experiments / 'quickstart.yaml'}\n"
        f"factors: {{heads: {{mha: {{}}, mqa: {{model.n_kv_head: 1}}}}}}\n{report}\n"
    )
    return path


def worked_example(number: int) -> dict[str, object]:
    """Return the names that an example of the package's page defines."""
    guide = (Path(kvlab.report.__file__).parent / "README.md").read_text()
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", guide, re.S)[number], names)
    return names


def test_the_worked_example_of_a_new_section(tmp_path, monkeypatch, capsys):
    """A function and a table line: sweeps, the command line and every format know it by its name."""
    store = Record().write(tmp_path / "store")
    command = ["report", "made", "--store", str(store.path), "--reports", str(tmp_path)]
    command += ["--sections", "cells,training-time"]
    assert main(command) == 2, "without its table line it is unknown"
    assert "training-time is not a section of reports" in capsys.readouterr().err
    entry = SectionEntry(worked_example(0)["report_training_time"])
    monkeypatch.setitem(SECTIONS, "training-time", entry)
    assert read_sweep(sweep_file(tmp_path, "report: {sections: [training-time]}"))
    assert main(command) == 0
    folder = tmp_path / "made"
    assert "## Training time\n\n24 cells." in (folder / "report.md").read_text()
    lines = list(csv.reader((folder / "tables" / "training-time.csv").open()))
    assert lines[1] == ["baseline", "10.0"]
    assert page_sections(folder) == ["cells", "training-time"]


def test_the_worked_example_of_a_new_metric(tmp_path, monkeypatch):
    for name, metric in worked_example(1)["LINE"].items():
        monkeypatch.setitem(METRICS, name, metric)
    folder = write_report(Record().write(tmp_path / "store"), "made", tmp_path, ["effects"])
    for row in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        expected = math.exp(row["measured.loss_served"])
        assert row["measured.perplexity"] == pytest.approx(expected, rel=1e-12)
    table = list(csv.DictReader((folder / "tables" / "effects-other.csv").open()))
    found = {row["level"]: row for row in table if row["measurement"] == "perplexity, served"}
    assert found["tied"]["verdict"] == "worse"


def test_a_section_that_this_version_lacks_says_how_to_go_on(tmp_path):
    store = Record(factors=HEADS).write(tmp_path / "store")
    store.write_sweep({**store.sweep("made"), "report": {"sections": ["cells", "later"]}})
    with pytest.raises(UsageError, match="report.sections = later is not a section.*--sections"):
        write_report(store, "made", tmp_path)
    assert write_report(store, "made", tmp_path, ["cells"]).is_dir()


def test_sections_enter_the_record_and_no_fingerprint(tmp_path):
    from kvlab.sweep.planning.planner import describe_sweep, plan

    plain = plan(read_sweep(sweep_file(tmp_path, "seeds: [0]")), provisional=True)
    sweep = read_sweep(sweep_file(tmp_path, "report: {sections: [answer, cells]}"))
    picked = plan(sweep, provisional=True)
    assert [one.trial.id for one in picked.trials] == [one.trial.id for one in plain.trials]
    frozen = describe_sweep(picked, yaml="", experiment_yaml="", command="")
    assert frozen["report"] == {"sections": ["answer", "cells"]}


def test_texts_of_two_tokenizers_have_the_overlap_of_their_own_lengths(tmp_path):
    """Where tokens are bytes, passages of four times as many tokens are looked for."""

    def overlap(found, levels, _seed):
        name = "bytes" if levels["text"] == "bytes" else "gpt2:512"
        shares = {"52": 0.2, "200": 0.004} if name == "bytes" else {"13": 0.3, "50": 0.006}
        found["experiment"]["data"]["tokenizer"] = name
        found["provenance"]["data"] |= {"tokenizer": name, "overlap": shares}

    store = Record(factors={"text": ("bytes", "pieces")}, change=overlap).write(tmp_path / "store")
    folder = write_report(store, "made", tmp_path, ["provenance"])
    rows = list(csv.reader((folder / "tables" / "provenance.csv").open()))
    found = {row[0].split()[3]: row[1:] for row in rows if row[0].startswith("held-out tokens in")}
    n_trials = str(len(store.sweep("made")["seeds"]))
    assert found == {
        "13-grams": ["30.00%", n_trials], "50-grams": ["0.60%", n_trials],
        "52-grams": ["20.00%", n_trials], "200-grams": ["0.40%", n_trials],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "judged"), [("bytes", "one-shot loss"), ("gpt2:512", "one-shot bits/byte")]
)
def test_one_loss_is_judged_and_once(tmp_path, tokenizer, judged):
    def change(found, levels, _seed):
        data = found["experiment"]["data"]
        data["tokenizer"] = "bytes" if levels["text"] == "bytes" else tokenizer
        for name in {"loss", "bits_per_byte"} & found["measurements"].keys():
            found["measurements"][name] += 0.01 if levels["text"] == "bytes" else 0.02

    store = Record(factors={"text": ("bytes", "other")}, change=change).write(tmp_path / "store")
    folder = write_report(store, "made", tmp_path, ["effects"])
    with (folder / "tables" / "effects-other.csv").open() as file:
        names = {row[0] for row in csv.reader(file)}
    assert names & {"one-shot loss", "one-shot bits/byte"} == {judged}


SEES_LESS = {"window": 8, "attention_pattern": "L"}


@pytest.mark.parametrize(
    ("model", "training", "is_said"),
    [
        (SEES_LESS, {}, True),
        (SEES_LESS, {"learning_rate": 1e-3}, True),
        ({**SEES_LESS, "qk_norm": True}, {}, False),
        ({**SEES_LESS, "local": {"n_kv_head": 1}}, {}, False),
        (SEES_LESS, {"tokens": 1228800}, False),
        ({"qk_norm": True}, {}, False),
    ],
)
def test_a_better_cell_that_only_sees_less_says_that_context_is_not_used(
    tmp_path, model, training, is_said
):
    def change(found, levels, _seed):
        if levels["horizon"] == "local":
            found["experiment"]["model"] |= model
            found["experiment"]["training"] |= training

    class Windowed(Record):
        def bytes(self, levels):
            return 1024 if levels["horizon"] == "local" else 2048

    effects = {"local": -0.1}
    record = Windowed(factors={"horizon": ("global", "local")}, effects=effects, change=change)
    folder = write_report(record.write(tmp_path / "store"), "made", tmp_path, ["answer"])
    said = "1 cell, **local**, sees fewer tokens than the baseline and is better."
    assert (said in (folder / "report.md").read_text()) == is_said


def test_times_without_bytes_are_a_table_without_a_figure(tmp_path):
    def measure(result, levels, _seed):
        for metric in ("tpot_ms_p50", "kv_bytes_read"):
            result["measurements"].pop(metric, None)
        is_mqa = levels["heads"] == "mqa"
        result["measurements"] |= {"tpot_ms_p50": 1.0} if is_mqa else {"kv_bytes_read": 64}

    store = Record(factors=HEADS, change=measure).write(tmp_path / "store")
    folder = write_report(store, "made", tmp_path)
    assert "Mean ± standard deviation over seeds; batch 1" in (folder / "report.md").read_text()
    assert not (folder / "figures" / "speed.svg").exists()
