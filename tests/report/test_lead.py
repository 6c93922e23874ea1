"""The first sentences: what they say does not turn on the last digit of an interval's end."""

from dataclasses import replace

import pytest

from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import judge_interval
from kvlab.report.lead import write_lead
from tests.studies.null_answers import write_sentences
from tests.support.record_factory import Record

TIMES = "\N{MULTIPLICATION SIGN}"
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


def text(study: Study) -> str:
    spans = write_lead(study)[0].spans
    return "".join(span if isinstance(span, str) else span.text for span in spans)


def test_an_upper_end_just_below_or_above_the_margin_gives_the_same_sentences(study):
    below = with_ends(study, trained=(-0.03, 0.02), mqa=(-0.0536, 0.0490))
    assert below.comparisons[("mqa",)].verdict_name == "bounded"
    first, listed = write_sentences(below), text(below)
    above = with_ends(study, trained=(-0.03, 0.02), mqa=(-0.0523, 0.0503))
    assert above.comparisons[("mqa",)].verdict_name == "undecided"
    assert write_sentences(above) == first
    assert f"less than 0.05 nats/token is that of trained. It stores 2.00{TIMES}" in listed
    assert f"mqa 4.00{TIMES} at \N{MINUS SIGN}0.0023 nats/token" in listed, "what is close is named"
    assert listed.endswith("to +0.0490).")


def test_a_lower_end_just_below_or_above_zero_gives_the_same_sentences(study):
    below = write_sentences(with_ends(study, trained=(-0.03, 0.02), mqa=(-0.001, 0.2)))
    assert write_sentences(with_ends(study, trained=(-0.03, 0.02), mqa=(0.001, 0.2))) == below


def test_a_cheap_cell_that_is_shown_to_cost_says_so_and_what_does_not_is_listed(study):
    found = text(with_ends(study, trained=(-0.1, 0.2), mqa=(0.01, 0.03)))
    assert (
        f"mqa. It stores 4.00{TIMES} less K/V than the baseline, and is shown to cost, too" in found
    )
    assert f"the smallest first: trained 2.00{TIMES} at +0.0500" in found


def test_where_all_cost_the_cheapest_is_named(study):
    found = text(with_ends(study, trained=(0.2, 0.3), mqa=(0.1, 0.4)))
    assert found.startswith("Every smaller cache that was tested is clearly shown to cost.")
    assert "The cheapest is that of trained." in found
