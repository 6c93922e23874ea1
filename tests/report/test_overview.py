"""The first screen: sentences that agree with the table, facts of the record, paired figures."""

import re
from copy import copy
from dataclasses import replace

import pytest

from kvlab.analysis.rankings import Ranking
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import judge_interval
from kvlab.report import answer_text
from kvlab.report import formatting as fmt
from kvlab.report.document import Strong
from kvlab.report.overview import write_lead
from kvlab.report.sections.cells import report_loss_curves
from tests.report.reading import load
from tests.support.record_factory import Record

HEADS = {"heads": ("mha", "mqa")}
MARGIN = 0.05


@pytest.mark.parametrize(("share", "is_close"), [(0.8, False), (0.93, True), (1.07, True)])
def test_the_answer_names_what_ends_close_to_the_margin(tmp_path, share, is_close):
    """On either side, since another machine may move it to the other."""
    record = Record(factors=HEADS, effects={"mqa": 0.03}, seeds=(0, 1, 2, 3), noise=0.002)
    (effect,) = load(record, tmp_path / "first").effects("loss_served")
    margin = {"margin": effect.high / share, "claims": ["heads=mqa"]}
    study = load(record, tmp_path / "second", "answer", decide=margin)
    close = [line for line in answer_text(study).splitlines() if line.startswith("Close to")]
    ends = fmt.format_difference("loss_served", effect.high)
    assert [f"heads=mqa (its interval ends at {ends})" in line for line in close] == [
        True
    ] * is_close


# What the first sentences say does not turn on the last digit of an interval's end.


@pytest.fixture(name="study")
def _study(tmp_path) -> Study:
    """Two smaller caches: of 2 and of 4 times less."""
    record = Record(factors={"kv": ("none", "trained", "mqa")})
    return load(record, tmp_path, decide={"margin": MARGIN})


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


def doc_text(paragraph) -> str:
    return "".join(one if isinstance(one, str) else one.text for one in paragraph.spans)


def named(study: Study) -> list[str]:
    """Return the cells that the first sentences name, in order."""
    return [span.text for span in write_lead(study)[0].spans if isinstance(span, Strong)]


@pytest.mark.parametrize(
    ("below", "above"),
    [
        pytest.param((-0.0536, 0.0490), (-0.0523, 0.0503), id="an upper end at the margin"),
        pytest.param((-0.001, 0.2), (0.001, 0.2), id="a lower end at zero"),
    ],
)
def test_an_end_just_below_or_above_a_bound_gives_the_same_sentences(study, below, above):
    verdicts, sentences = [], []
    for mqa in (below, above):
        found = with_ends(study, trained=(-0.03, 0.02), mqa=mqa)
        verdicts.append(found.comparisons["mqa",].verdict_name)
        spans = [span for line in write_lead(found) for span in line.spans]
        text = [
            re.sub("[+\N{MINUS SIGN}-]?\\b\\d[\\d.,]*", "#", s) if isinstance(s, str) else s.text
            for s in spans
        ]
        sentences.append(text)
    assert verdicts[0] != verdicts[1]
    assert sentences[0] == sentences[1]


@pytest.mark.parametrize(
    ("trained", "mqa", "cells"),
    [
        pytest.param((-0.1, 0.2), (0.01, 0.03), ["mqa", "trained"], id="cheap, though it costs"),
        pytest.param((0.01, 0.03), (0.2, 0.3), ["trained"], id="the other is shown to cost"),
        pytest.param((0.2, 0.3), (0.1, 0.4), ["trained"], id="all cost: the cheapest at worst"),
        pytest.param((-0.2, 0.2), (-0.2, 0.2), ["mqa", "trained"], id="none is cheap"),
        pytest.param((-0.03, 0.02), (-0.053, 0.049), ["trained", "mqa"], id="what is close"),
    ],
)
def test_cheap_cells_come_first_and_then_those_that_are_not_shown_to_cost(
    study, trained, mqa, cells
):
    assert named(with_ends(study, trained=trained, mqa=mqa)) == cells


@pytest.mark.parametrize(("trained", "mqa"), [(0.01, 0.02), (0.02, 0.01)])
def test_of_cheap_caches_of_equal_bytes_the_one_is_named_that_may_lose_least(study, trained, mqa):
    found = with_ends(study, trained=(-0.03, trained), mqa=(-0.03, mqa))
    found.size_factor = lambda _: 2.0
    assert named(found)[0] == ("trained" if trained < mqa else "mqa")


@pytest.mark.parametrize(("mqa", "is_named"), [((-0.03, 0.02), True), ((-0.1, 0.2), False)])
def test_a_cheap_cache_of_equal_bytes_that_is_not_told_apart_is_named_too(
    study, monkeypatch, mqa, is_named
):
    found = with_ends(study, trained=(-0.03, 0.01), mqa=mqa)
    found.size_factor = lambda _: 2.0
    monkeypatch.setattr(Ranking, "told_apart", lambda *_: False)
    lead = doc_text(write_lead(found)[0])
    assert ("As small, and not told apart from it: mqa." in lead) == is_named


@pytest.mark.parametrize(
    ("mqa", "cells"),
    [
        pytest.param((-0.2, -0.1), ["mqa"], id="cheap without it, too"),
        pytest.param((-0.1, 0.2), ["trained", "mqa"], id="undecided without it"),
        pytest.param((0.2, 0.3), ["trained"], id="costs without it"),
    ],
)
def test_what_is_said_holds_without_the_trainings_that_went_wrong(study, mqa, cells):
    other = with_ends(copy(study), trained=(-0.3, -0.1), mqa=mqa)
    study.__dict__ |= {"without_wrong": other, "wrong_trainings": {"0" * 16: 8.0}}
    assert named(with_ends(study, trained=(-0.3, -0.1), mqa=(-0.3, -0.1))) == cells


@pytest.mark.parametrize("status", ["failed", "diverged", "missing"])
def test_a_level_that_is_not_measured_has_no_difference(tmp_path, status):
    """It is not said to differ by zero, nor that its cache is no smaller."""
    states = {"mha": "done", "mqa": status}
    record = Record(factors=HEADS, status=lambda levels, _: states[levels["heads"]])
    (line,) = write_lead(load(record, tmp_path, decide={"margin": MARGIN}))
    said = "No measured cell's cache is smaller than its reference's by 1% or more."
    assert line.spans == (said,)


@pytest.mark.parametrize("final", [8192, 8200])
def test_losses_of_equal_windows_are_not_said_to_be_of_other_tokens(tmp_path, final):
    def change(found, *_):
        found["experiment"]["model"] |= {"block_size": 100}
        found["experiment"]["training"] |= {"evaluate_tokens": 8192}  # 82 windows
        found["measurements"] |= {"loss_tokens": final}

    section = report_loss_curves(load(Record(factors=HEADS, change=change), tmp_path))
    assert ("8,200" in str(section)) == (final != 8200)


@pytest.mark.parametrize("points", [1, 2])
def test_a_loss_curve_has_two_points_or_more(tmp_path, points):
    study = load(Record(factors=HEADS, points=points), tmp_path)
    assert (report_loss_curves(study) is not None) == (points > 1)
