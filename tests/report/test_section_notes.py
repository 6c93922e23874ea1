"""What sections say beside their tables: units, what a curve's end is, how times were taken."""

import csv
import re

import pytest

from kvlab.analysis.study import Study
from kvlab.report import write_report
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from tests.support.record_factory import Record, TunedRecord, no_learned_hybrid

SMALL = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}


def markdown(record, folder, *sections):
    study = Study.load(record.write(folder), "made", sections)
    return render_markdown(make_document(study))


class Scored(Record):
    """A record whose accuracies are given."""

    shares: dict[str, float] = {}  # noqa: RUF012

    def measurements(self, levels, seed):
        found = super().measurements(levels, seed)
        return {**found, "hellaswag_items": 50, "hellaswag_acc_norm_stderr": 0.01, **self.shares}


def test_the_error_of_accuracies_is_the_largest_of_the_table(tmp_path):
    class Wide(Scored):
        shares = {"hellaswag_acc": 0.5, "hellaswag_acc_norm": 0.3, "hellaswag_acc_norm_served": 0.2}  # noqa: RUF012

    text = markdown(Wide(factors=SMALL), tmp_path, "hellaswag")
    shown = [float(error) for error in re.findall("\N{PLUS-MINUS SIGN} ([0-9.]+)", text)]
    said = re.search(r"standard error of up to ([0-9.]+) points", text)
    assert float(said[1]) == max(shown) == 7.14
    differ = re.search(r"must differ by about ([0-9.]+) points", text)
    assert float(differ[1]) == pytest.approx(2 * 2**0.5 * max(shown), abs=0.06)


@pytest.mark.parametrize(("best", "learned"), [(0.25, False), (0.37, False), (0.6, True)])
def test_accuracies_at_chance_are_said_to_be_no_finding(tmp_path, best, learned):
    class Made(Scored):
        def measurements(self, levels, seed):
            one = best if levels["heads"] == "mqa" else 0.22
            names = ("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_served")
            return super().measurements(levels, seed) | dict.fromkeys(names, one)

    text = markdown(Made(factors=SMALL), tmp_path, "hellaswag", "pareto")
    assert ("No accuracy here is above chance" in text) != learned
    assert ("There is no front of HellaSwag" in text) != learned
    assert ("figures/pareto-hellaswag-stored.svg" in text) == learned


def test_the_one_shot_loss_beside_the_served_one_is_of_the_same_text(tmp_path):
    class Partly(Record):
        def measurements(self, levels, seed):
            found = super().measurements(levels, seed)
            return {**found, "loss": 9.0, "loss_tokens": 16_384, "served_tokens": 4096}

    record = Partly(factors=SMALL)
    store = record.write(tmp_path)
    study = Study.load(store, "made", ("cells", "serving-gap"))
    tied = ("mha", "tied")
    same = study.mean(tied, "loss_served") - study.mean(tied, "serving_gap")
    for section in ("cells", "serving-gap"):
        text = render_markdown(make_document(Study.load(store, "made", (section,))))
        assert f"{same:.4f}" in text
        assert "9.0000" not in text


@pytest.mark.parametrize(("share", "warned"), [(0.0058, False), (0.305, True)])
def test_held_out_text_that_was_trained_on_is_said(tmp_path, share, warned):
    class Overlapping(Record):
        def result(self, levels, seed, status):
            found = super().result(levels, seed, status)
            found["provenance"]["data"]["overlap"] = {"13": 0.5, "50": share}
            return found

    text = markdown(Overlapping(factors=SMALL), tmp_path, "provenance")
    assert f"held-out tokens in 50-grams of the training text | `{share:.2%}` | 12" in text
    assert (f"**Leaked text:** {share:.1%} of the held-out tokens" in text) == warned


def test_the_compute_is_said_with_what_it_leaves_out(tmp_path):
    record = Record(
        factors={"heads": ("mha", "mqa")},
        status=lambda levels, seed: "diverged" if (levels["heads"], seed) == ("mqa", 2) else "done",
    )
    text = markdown(record, tmp_path / "made", "provenance")
    assert "**Compute:** 5 T training FLOPs in 5 trainings, and 0.05 CPU core hours" in text
    assert "Not counted: the FLOPs of 1 trial that failed or diverged." in text
    tuned = markdown(TunedRecord(), tmp_path / "tuned", "provenance")
    assert "Not counted: all trials of the tuning, whose results this record does not" in tuned


def bigram_record(table):
    class Trained(Record):
        def measurements(self, levels, seed):
            found = super().measurements(levels, seed)
            loss = found["loss"]
            margin = table if levels["heads"] == "mqa" else 0.25
            return {**found, "loss_bigram": loss + margin, "loss_unigram": loss + 2}

    return Trained(factors=SMALL)


def test_models_that_do_not_beat_a_bigram_table_are_said_first(tmp_path):
    text = markdown(bigram_record(-0.01), tmp_path / "bad", "answer")
    words = "**6 of 12 trained models cannot yet do what a bigram table does.**"
    assert text.split("\n\n")[3].startswith(words), "before any verdict"
    good = markdown(bigram_record(0.05), tmp_path / "good", "answer")
    assert "Every model beats a bigram table" in good
    assert "the closest by 0.0500" in good
    assert "bigram" not in markdown(Record(factors=SMALL), tmp_path / "old", "answer")


def test_curves_say_where_they_end_at_other_tokens_than_the_tables(tmp_path):
    class Curved(Record):
        def result(self, levels, seed, status):
            found = super().result(levels, seed, status)
            found["experiment"]["training"] |= {"evaluate_tokens": 8192}
            found["measurements"] |= {"loss_tokens": self.scored}
            return found

    words = "(8,192 and 16,384), so a curve does not end at its cell's loss there"
    for tokens, said in ((16_384, True), (8192, False)):
        Curved.scored = tokens
        folder = tmp_path / str(tokens)
        assert (words in markdown(Curved(factors=SMALL), folder, "curves")) == said


def test_times_taken_beside_others_are_said_beside_their_verdicts(tmp_path):
    class Timed(Record):
        def result(self, levels, seed, status):
            found = super().result(levels, seed, status)
            found["provenance"]["timings"] = self.said if seed == 0 else "exclusive"
            return found

    for said in ("shared", "exclusive"):
        Timed.said = said
        text = markdown(Timed(factors=SMALL), tmp_path / said, "effects")
        other = text.split("<summary>Effects on other measurements")[1]
        assert ("4 of 12 trials were timed while something else" in other) == (said == "shared")


def test_absent_combinations_are_said_once(tmp_path):
    record = Record(exclude=no_learned_hybrid)
    store = record.write(tmp_path)
    plain = render_markdown(make_document(Study.load(store, "made")))
    assert "6 of 24 combinations are not in the design: position=learned with" in plain
    rule = "exclude 1 removed 6 of 24: position: learned, horizon: hybrid"
    store.write_sweep({**store.sweep("made"), "rules": [rule]})
    ruled = render_markdown(make_document(Study.load(store, "made")))
    assert ruled.count("6 of 24") == 1
    assert "- A level is compared only where its partner exists." in ruled


def test_heads_are_explained_in_every_form(tmp_path):
    store = Record(seeds=(0, 1, 2)).write(tmp_path / "s")
    folder = write_report(store, "made", tmp_path, ["effects", "memory"])
    text, page = ((folder / name).read_text() for name in ("report.md", "report.html"))
    for name, head, hint in (
        ("effects", "KV smaller", "KV bytes divided by the level"),
        ("effects", "over settings", "smallest and largest mean difference"),
        ("memory", "peak with cache", "largest over seeds"),
    ):
        latex = (folder / "tables" / f"{name}.tex").read_text().replace("\\", "")
        assert f"*{head}*: " in text
        assert f"<i>{head}</i>: " in page
        assert f"emph{{{head}}}: " in latex
        for form in (text, page, latex):
            assert hint in form, (head, form[:50])
    with (folder / "tables" / "memory.csv").open() as file:
        heads = next(csv.reader(file))
    assert {"peak with cache (bytes)", "peak without (bytes)"} <= set(heads)
    assert "| peak with cache |" in text


def test_tables_and_figures_are_numbered(tmp_path):
    text = markdown(Record(factors=SMALL), tmp_path, "cells", "pareto", "memory")
    assert re.findall(r"^\*(Table \d+)\.", text, re.M) == [f"Table {n}" for n in (1, 2, 3, 4)]
    figures = re.findall(r"^\*(Figure \d+)\.", text, re.M)
    assert figures == [f"Figure {n}" for n in range(1, len(figures) + 1)]
    assert figures


@pytest.mark.parametrize(
    ("sharing", "said"),
    [(("none", "tied"), "the other cell has none"), (("none", "trained", "tied"), "2 cells have")],
)
def test_cells_without_a_serving_gap_are_counted(tmp_path, sharing, said):
    text = markdown(Record(factors={"sharing": sharing}), tmp_path, "serving-gap")
    assert said in text
    assert f"1 of {len(sharing)} cells has one; the largest is **tied**" in text
