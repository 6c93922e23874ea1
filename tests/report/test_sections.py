"""Sections: picked by a sweep, refused where they are not there, and new ones."""

import csv
import json
import math
import re
from pathlib import Path

import pytest

import kvlab.report
from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.cli.shared_arguments import read_sweep
from kvlab.errors import UsageError
from kvlab.report import write_report
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS, SectionEntry
from kvlab.report.table_export import table_to_csv
from kvlab.store.metrics import METRICS
from tests.support.record_factory import Record


def test_a_sweep_picks_its_sections_and_their_order(tmp_path, capsys):
    store = Record().write(tmp_path / "store")
    sweep = store.sweep("made")
    asked = ["effects", "answer", "provenance"]
    store.write_sweep({**sweep, "report": {"sections": asked}})
    folder = write_report(store, "made", tmp_path)
    page = (folder / "report.html").read_text()
    assert re.findall(r'<section id="([a-z-]+)"', page) == asked
    assert "`kvlab report made`" in (folder / "report.md").read_text()
    assert {path.stem for path in (folder / "figures").iterdir()} == {"effects", "pareto"}

    command = ["report", "made", "--store", str(store.path), "--reports", str(tmp_path / "other")]
    assert main([*command, "--sections", "provenance,cells"]) == 0
    other = tmp_path / "other" / "made"
    page = (other / "report.html").read_text()
    assert re.findall(r'<section id="([a-z-]+)"', page) == ["provenance", "cells"]
    text = (other / "report.md").read_text()
    assert "`kvlab report made --sections provenance,cells`" in text
    for wrong, words in (("celss", "did you mean cells?"), ("cells,cells", "cells twice")):
        assert main([*command, "--sections", wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_section_that_this_version_lacks_says_how_to_go_on(tmp_path):
    store = Record().write(tmp_path / "store")
    store.write_sweep({**store.sweep("made"), "report": {"sections": ["answer", "later"]}})
    with pytest.raises(UsageError, match="report.sections = later is not a section.*--sections"):
        write_report(store, "made", tmp_path)
    assert write_report(store, "made", tmp_path, ["answer"]).is_dir()


def sweep_file(folder: Path, report: str) -> Path:
    experiments = Path(__file__).parent.parent.parent / "experiments"
    path = folder / "heads.yaml"
    path.write_text(
        f"question: Why?\nexperiment: {experiments / 'quickstart.yaml'}\n"
        f"factors: {{heads: {{mha: {{}}, mqa: {{model.n_kv_head: 1}}}}}}\n{report}\n"
    )
    return path


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("report: {sections: [answer, paretto]}", ":4:29: report.sections.1 = paretto is not a section of reports; did you mean pareto?"),
        ("report: {sections: [xyz]}", ":4:21: report.sections.0 = xyz is not a section of reports; use answer, pareto"),
        ("report: {secions: [answer]}", ":4:10: report.secions is not a known key; did you mean sections?"),
        ("report: {sections: [answer, answer]}", "names answer twice; name each once"),
        ("report: {sections: []}", "has too few entries"),
        ("report: {sections: answer}", "is not a list"),
    ],
)  # fmt: skip
def test_wrong_sections_are_refused_with_their_place(tmp_path, capsys, report, said):
    path = sweep_file(tmp_path, report)
    assert main(["plan", str(path), "--store", str(tmp_path / "store")]) == 2
    assert said in capsys.readouterr().err


def test_sections_enter_the_record_and_no_fingerprint(tmp_path):
    from kvlab.sweep.planning.planner import describe_sweep, plan

    plain = plan(read_sweep(sweep_file(tmp_path, "seeds: [0]")), provisional=True)
    sweep = read_sweep(sweep_file(tmp_path, "report: {sections: [answer, cells]}"))
    picked = plan(sweep, provisional=True)
    assert [one.trial.id for one in picked.trials] == [one.trial.id for one in plain.trials]
    frozen = describe_sweep(picked, yaml="", experiment_yaml="", command="")
    assert frozen["report"] == {"sections": ["answer", "cells"]}


def test_the_worked_example_of_a_new_section(tmp_path, monkeypatch, capsys):
    """A function and a table line: sweeps, the command line and every format know it by its name."""
    guide = (Path(kvlab.report.__file__).parent / "README.md").read_text()
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", guide, re.S)[0], names)
    store = Record().write(tmp_path / "store")
    command = ["report", "made", "--store", str(store.path), "--reports", str(tmp_path)]
    command += ["--sections", "answer,training-time"]
    assert main(command) == 2, "without its table line it is unknown"
    with monkeypatch.context() as patch:
        patch.setitem(SECTIONS, "training-time", SectionEntry(names["report_training_time"]))
        assert read_sweep(sweep_file(tmp_path, "report: {sections: [training-time]}"))
        assert main(command) == 0
    folder = tmp_path / "made"
    assert "## Training time\n\n24 cells." in (folder / "report.md").read_text()
    rows = list(csv.reader((folder / "tables" / "training-time.csv").open()))
    assert rows[1] == ["baseline", "10.0"]
    assert 'id="training-time"' in (folder / "report.html").read_text()
    capsys.readouterr()
    assert main(command) == 2
    assert "training-time is not a section of reports" in capsys.readouterr().err


def test_the_worked_example_of_a_new_metric(tmp_path, monkeypatch):
    guide = (Path(kvlab.report.__file__).parent / "README.md").read_text()
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", guide, re.S)[1], names)
    for name, metric in names["LINE"].items():
        monkeypatch.setitem(METRICS, name, metric)
    folder = write_report(Record().write(tmp_path / "store"), "made", tmp_path, ["effects"])
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for row in rows:
        expected = math.exp(row["measured.loss_served"])
        assert row["measured.perplexity"] == pytest.approx(expected, rel=1e-12)
    table = list(csv.DictReader((folder / "tables" / "effects-other.csv").open()))
    found = {row["level"]: row for row in table if row["measurement"] == "perplexity, served"}
    assert found["tied"]["verdict"] == "worse"


def test_trials_timed_beside_others_are_counted(tmp_path):
    store = Record().write(tmp_path / "store")
    trials = store.sweep_trials("made")

    def speed(said):
        for trial, timings in zip(trials, said, strict=True):
            result = store.result(trial)
            result["provenance"]["timings"] = timings
            (store.trial_directory(trial) / "result.json").unlink()
            store.write_result(result)
        return render_markdown(make_document(Study.load(store, "made", ["speed"])))

    count = len(trials)
    alone = speed(["exclusive"] * count)
    assert "disturbed" not in alone
    some = speed(["shared", "shared"] + ["exclusive"] * (count - 2))
    assert f"2 of {count} trials were timed while something else used their device" in some
    assert "| **2 of 3** |" in some
    assert "The record does not say" in speed([None] * count)


def test_times_have_verdicts_only_where_trials_were_timed_alone_and_interleaved(tmp_path):
    class Timed(Record):
        timings = "exclusive"
        apart = False

        def measurements(self, levels, seed):
            slow = 0.5 if levels["heads"] == "mqa" else 0.0
            return {**super().measurements(levels, seed), "tpot_ms_p50": 1 + slow + 0.01 * seed**2}

        def result(self, levels, seed, status):
            found = super().result(levels, seed, status)
            late = self.apart and levels["heads"] == "mqa"
            found["provenance"] |= {"timings": self.timings}
            found["provenance"] |= {"finished": f"2026-01-02T0{3 + late}:{seed:02d}:30Z"}
            return found

    def verdict(name, **changes):
        record = Timed(factors={"heads": ("mha", "mqa")})
        for key, value in changes.items():
            setattr(record, key, value)
        document = make_document(Study.load(record.write(tmp_path / name), "made"))
        table = next(table for table in document.tables if table.name == "effects-other")
        rows = csv.DictReader(table_to_csv(table).splitlines())
        found = [row for row in rows if row["measurement"].startswith("time per output")]
        return [row["verdict"] for row in found], render_markdown(document)

    found, text = verdict("alone")
    assert found == ["worse"]
    assert "figures/pareto-time.svg" in text
    shared = Timed(factors={"heads": ("mha", "mqa")})
    shared.timings = "shared"
    store = shared.write(tmp_path / "decided")
    store.write_sweep({**store.sweep("made"), "decide": {"metric": "tpot_ms_p50"}})
    study = Study.load(store, "made")
    (effect,) = study.effects("tpot_ms_p50")
    assert (effect.verdict, effect.has_interval) == ("not judged", False)
    compared = study.comparisons["mqa",]
    assert (compared.verdict_name, compared.has_interval) == ("disturbed", False)
    for name, changes, why in (
        ("shared", {"timings": "shared"}, "All trials were timed while something else used"),
        (
            "unknown",
            {"timings": None},
            "The record does not say whether the trials were timed alone",
        ),
        ("apart", {"apart": True}, "1 cell were timed before or after all of the baseline's"),
    ):
        found, text = verdict(name, **changes)
        assert found == []
        assert why in text.split("Speed is not judged.")[1][:100]
        assert "pareto-time" not in text


class CoarseRecord(Record):
    """Cells that are served in int4, of which one factor's second level was trained so, too."""

    def measurements(self, levels, seed):
        changes = {"kv_dtype_loss_change": 1e-3, "kv_dtype_logit_rms": 0.1}
        return super().measurements(levels, seed) | changes

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        found["experiment"]["serving"] = {"kv_dtype": "int4", "kv_group": 8}
        if "mqa" in levels.values():
            found["experiment"]["training"] |= {"kv_dtype": "kivi2", "kv_residual": 16}
        return found


def test_the_dtype_of_the_cache_stands_beside_what_training_read(tmp_path):
    study = Study.load(CoarseRecord().write(tmp_path / "store"), "made")
    section = SECTIONS["serving-gap"].make(study)
    [table] = [part for part in section.contents if getattr(part, "name", "") == "kv-dtype"]
    kept = {tuple(part.text for part in row.cells[1:3]) for row in table.rows}
    assert kept == {
        ("int4, groups of 8", "exact K and V"),
        ("int4, groups of 8", "kivi2, newest 16 in full"),
    }
