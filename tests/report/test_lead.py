"""The first sentences: what they say does not turn on the last digit of an interval's end."""

from dataclasses import replace

import pytest

from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import judge_interval
from kvlab.report.document import Strong
from kvlab.report.lead import write_lead
from tests.studies.null_answers import write_sentences
from tests.support.record_factory import Record

MARGIN = 0.05


@pytest.fixture(name="study")
def _study(tmp_path) -> Study:
    """Two smaller caches: of 2 and of 4 times less."""
    store = Record(factors={"kv": ("none", "trained", "mqa")}).write(tmp_path)
    store.write_sweep({**store.sweep("made"), "decide": {"margin": MARGIN}})
    return Study.load(store, "made")


def with_ends(study: Study, **ends: tuple[float, float]) -> Study:
    """Return a study whose cells have these intervals and the verdicts that follow."""
    judged = {}
    for levels, found in study.comparisons.items():
        low, high = ends[levels[0]]
        estimate = replace(found.estimate, low=low, high=high, value=(low + high) / 2)
        name = judge_interval(low, high, "lower", MARGIN)
        judged[levels] = replace(found, estimate=estimate, effect=None, verdict_name=name)
    study.__dict__["comparisons"] = judged
    return study


def named(study: Study) -> list[str]:
    """Return the cells that the first sentences name, in order."""
    return [span.text for span in write_lead(study)[0].spans if isinstance(span, Strong)]


def test_an_upper_end_just_below_or_above_the_margin_gives_the_same_sentences(study):
    below = with_ends(study, trained=(-0.03, 0.02), mqa=(-0.0536, 0.0490))
    assert below.comparisons[("mqa",)].verdict_name == "bounded"
    first, cells = write_sentences(below), named(below)
    above = with_ends(study, trained=(-0.03, 0.02), mqa=(-0.0523, 0.0503))
    assert above.comparisons[("mqa",)].verdict_name == "undecided"
    assert write_sentences(above) == first
    assert cells == ["trained", "mqa"], "what is close is named"


def test_a_lower_end_just_below_or_above_zero_gives_the_same_sentences(study):
    below = write_sentences(with_ends(study, trained=(-0.03, 0.02), mqa=(-0.001, 0.2)))
    assert write_sentences(with_ends(study, trained=(-0.03, 0.02), mqa=(0.001, 0.2))) == below


@pytest.mark.parametrize(
    ("trained", "mqa", "cells"),
    [
        (
            (-0.1, 0.2),
            (0.01, 0.03),
            ["mqa", "trained"],
        ),  # cheap, though it costs; not shown to cost
        ((0.01, 0.03), (0.2, 0.3), ["trained"]),  # the other is shown to cost
        ((0.2, 0.3), (0.1, 0.4), ["trained"]),  # all cost: the cheapest at worst
        ((-0.2, 0.2), (-0.2, 0.2), ["mqa", "trained"]),  # none is cheap: the smallest first
    ],
)
def test_cheap_cells_come_first_and_then_those_that_are_not_shown_to_cost(
    study, trained, mqa, cells
):
    assert named(with_ends(study, trained=trained, mqa=mqa)) == cells
