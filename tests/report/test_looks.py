"""Looks in reports, and seeds that were added after a report."""

import pytest

from kvlab.analysis.sequential import ClaimState, repeated_p_value, t_bounds
from kvlab.analysis.study import Study
from kvlab.report import write_report
from kvlab.store import Store
from tests.report import reading
from tests.support.stub_looks import LOOKS, drive_looks, load_looks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looks")
    drive_looks(load_looks(folder), Store(folder / "runs"))
    return folder


def markdown(folder, *sections):
    return reading.markdown(Study.load(Store(folder / "runs"), "s", sections))


def test_effects_have_the_interval_and_the_seeds_of_their_decision(folder):
    study = Study.load(Store(folder / "runs"), "s")
    effects = {effect.name: effect for effect in study.effects("loss")}
    last = study.taken_looks[-1].states
    for name, seeds, verdict in (("heads=mqa", 5, "worse"), ("position=rope", 7, "within noise")):
        effect = effects[name]
        assert (len(effect.seeds), effect.verdict) == (seeds, verdict)
        state = last[name]
        assert (effect.value, effect.low, effect.high) == (state.value, state.low, state.high)
        assert (effect.corrected_p <= 0.05) == (verdict == "worse")


def test_a_repeated_p_value_is_the_level_whose_bound_is_reached():
    level = repeated_p_value(ClaimState(sizes=(3, 5, 7), value=1.0, error=0.3), 10)
    assert t_bounds((3, 5, 7), 10, level)[-1] == pytest.approx(1 / 0.3, rel=0.01)


def drive_seeds(folder, seeds):
    text = LOOKS.replace("{looks: [3, 5, 7]}", str(seeds))
    drive_looks(load_looks(folder, text), Store(folder / "runs"))


def test_seeds_that_are_added_after_a_report_are_recognized(tmp_path):
    store, reports = Store(tmp_path / "runs"), tmp_path / "reports"
    for seeds in ([0, 1], [0, 1, 2], [0, 1, 2, 3, 4]):
        drive_seeds(tmp_path, seeds)
        assert "looks" not in Study.load(store, "s").sweep
        write_report(store, "s", reports, ["looks"])
    text = (reports / "s" / "report.md").read_text()
    assert "at 2, 3 seeds, and then seeds were added: now there are 5" in text
    assert "`seeds: {looks: [2, 3, 5]}`" in text
    write_report(store, "s", reports, ["looks"])
    assert (reports / "s" / "report.md").read_text() == text
