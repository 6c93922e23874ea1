"""Where the numbers of a report come from: each is found, and sums are what the report says."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report import number_origins
from kvlab.report.markdown import render_markdown
from kvlab.report.number_origins import find_origins
from kvlab.report.printed_numbers import find_numbers
from kvlab.report.report_files import make_document
from kvlab.store.timings import TimedTrial, TimingSession, write_timings
from tests.support.record_factory import Record


def status(levels, seed):
    """Leave a trial out of each of several cells, each for another reason."""
    if levels["sharing"] == "tied":
        return "failed" if seed == 2 else "done"
    return "diverged" if levels["heads"] == "mqa" and seed == 1 else "done"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
    record = Record(factors=factors, seeds=(0, 1, 2, 3), status=status)
    return Study.load(record.write(tmp_path_factory.mktemp("origins")), "made")


def test_every_number_of_a_report_is_found_and_computed_again(study, monkeypatch):
    document = make_document(study)
    monkeypatch.setattr(number_origins, "make_document", lambda _: document)
    page = render_markdown(document).partition("<summary>Provenance")[0]
    numbers = {one.text: one for line in page.splitlines() for one in find_numbers(line)
               if line.startswith("| ") and ":" not in line}  # fmt: skip
    assert len(numbers) > 60
    weighted = 0
    for text, number in numbers.items():
        found = find_origins(study, number)
        assert any(one.places for one in found.origins) or found.sentences, text
        for one in found.origins:
            assert one.terms, text
            if one.is_weighted:
                weighted += 1
                assert one.recompute() == pytest.approx(one.value, rel=1e-9, abs=1e-12), one.title
    assert weighted > 20


def test_the_most_specific_comes_first_and_others_are_rounded(study):
    mean = study.means("loss_served")[study.baseline]
    (number,) = find_numbers(f"{mean:.4f}")
    found = find_origins(study, number)
    sizes = [(not one.places, len(one.terms)) for one in found.origins]
    assert sizes == sorted(sizes)
    assert not found.is_rounded
    (fewer,) = find_numbers(f"{mean:.3f}")
    further = find_origins(study, fewer)
    assert further.is_rounded
    assert any("loss" in one.title for one in further.origins)


def test_a_time_that_was_taken_again_names_its_session(tmp_path):
    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    store = record.write(tmp_path / "runs")
    trial = record.trial({"heads": "mqa"}, 0)
    again = {trial: TimedTrial(store.result_seal(trial), {"tpot_ms_p50": 7.654321}, ())}
    times = ("2026-01-03T00:00:00Z", "2026-01-03T00:01:00Z")
    session = TimingSession(0, *times, "cpu", 1, None, again)
    write_timings(store.sweep_directory("made"), [session])
    (number,) = find_numbers("7.654321")
    (found,) = find_origins(Study.load(store, "made"), number).origins
    assert "tpot_ms_p50" in found.title
    assert f"timed again {times[0]} to {times[1]}" in found.formula
    assert "timings.json of the sweep" in found.formula


def test_a_column_of_another_unit_is_not_its_place(tmp_path):
    class Scored(Record):
        def measurements(self, levels, seed):
            found = super().measurements(levels, seed)
            return found | {"loss_tokens": found["kv_bytes_storage"]}

    record = Scored(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    study = Study.load(record.write(tmp_path / "runs"), "made")
    (number,) = find_numbers("1,048,576")
    titles = {one.title.partition(" (")[0]: one for one in find_origins(study, number).origins}
    assert titles["KV bytes by formula"].places
    assert not titles["validation tokens scored one-shot"].places
