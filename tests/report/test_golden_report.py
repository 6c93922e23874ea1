"""Reports of a made-up design, word for word.

`KVLAB_REWRITE_GOLDEN=1 python -m pytest tests/report/test_golden_report.py` writes the files in
`golden/` anew; read their diff before you commit it.
"""

from pathlib import Path

import pytest

from tests.report.full_record import FullRecord
from tests.report.reading import load, markdown
from tests.support.extensions import needs
from tests.support.golden import check_golden
from tests.support.record_factory import MatchedRecord, Record

GOLDEN = Path(__file__).parent / "golden"
SECTIONS = ("answer", "looks", "probes", "failures")
"""What `test_committed_reports` does not hold, or not as a record with failed trials has it."""


def state(sizes, value, error, bound, outcome):
    """A claim after a look: 5% over both looks and four claims."""
    reach = bound * error
    return {
        "sizes": sizes, "value": value, "error": error, "level": 0.0125, "bound": bound,
        "low": value - reach, "high": value + reach, "outcome": outcome, "is_open": not outcome,
    }  # fmt: skip


class GoldenRecord(FullRecord):
    """Ties, two looks, a failed and a pruned trial, a level that is worse and one undecided."""

    def __init__(self):
        super().__init__(effects={"mqa": 0.10, "trained": 0.03}, noise=0.02)

    def loss(self, levels, seed):
        return round(super().loss(levels, seed), 6)  # the last digits are the processor's

    def measurements(self, levels, seed):
        return super().measurements(levels, seed) | {"loss_bigram": 4.05}

    def description(self, cells):
        claims = ["heads=mqa", "sharing=trained", "sharing=tied"]
        decide = {"margin": 0.05, "claims": claims}
        first = {
            "heads=mqa": state([3], 0.11, 0.006, 57.0, ""),
            "sharing=trained": state([3], 0.04, 0.006, 57.0, ""),
            "sharing=tied": state([3], 1.52, 0.01, 57.0, "worse"),
        }
        second = first | {
            "heads=mqa": state([3, 5], 0.1, 0.005, 6.5, "worse"),
            "sharing=trained": state([3, 5], 0.03, 0.008, 6.5, ""),
        }
        taken = [
            {"number": number, "seeds": seeds, "metric": "loss_served", "states": states}
            for number, seeds, states in ((1, 3, first), (2, 5, second))
        ]
        declared = {"seeds": {"looks": [3, 5], "first": 0}, "decide": decide, "design": "made"}
        stages = {"declared": {"looks": declared}, "number": 3, "name": "done", "is_last": True}
        found = {**super().description(cells), "decide": decide}
        return found | {"stages": stages, "looks": {"taken": taken}}


EVEN = {"on": 0.02}


def is_odd(levels):
    """Half of a design of four factors: a pair of levels is the same contrast as the other."""
    return [*levels.values()].count("on") % 2 == 1


HEADS = {"heads": ("mha", "mqa")}
SMALL = {**HEADS, "sharing": ("none", "tied")}


def half_missing(levels, seed):
    return "done" if levels["heads"] == "mha" else "missing" if seed else "diverged"


def lose_mha(levels, _seed):
    return "failed" if levels["heads"] == "mha" else "done"


def store_more(found, _levels, seed):
    found["measurements"]["kv_bytes_storage"] += seed


def mix_code(found, _levels, seed):
    found["provenance"] |= {"commit": f"{seed}" * 40, "dirty": True}


def accuracies(*shares):
    def change(found, *_):
        found["measurements"] |= dict(zip(ACCURACIES, shares, strict=True))
        found["measurements"] |= {"hellaswag_items": 50, "hellaswag_acc_norm_stderr": 0.01}

    return Record(factors=SMALL, change=change)


def leaked(share):
    def change(found, *_):
        found["provenance"]["data"]["overlap"] = {"13": 0.5, "50": share}

    return Record(factors=HEADS, change=change)


def beats_bigrams_by(margin):
    def change(found, levels, _seed):
        loss, own = found["measurements"]["loss"], margin if levels["heads"] == "mqa" else 0.25
        found["measurements"] |= {"loss_bigram": loss + own, "loss_unigram": loss + 2}

    return Record(factors=HEADS, change=change)


def one_shot_of_more(found, *_):
    """The loss of a longer text is not the one that a served loss is compared with."""
    found["measurements"] |= {"loss": 9.0, "loss_tokens": 16_384, "served_tokens": 4096}


def round_off(found, levels, seed):
    """Of plain caches a divergence of 1e-14 differs surely between cells, and means nothing."""
    level = SERVING.index(levels["serving"])
    found["measurements"]["serving_kl"] = 1e-14 * (1 + level + seed / 100)
    found["measurements"]["serving_top_changed"] = 0.0


def scored_tokens(count):
    def change(found, *_):
        found["experiment"]["training"] |= {"evaluate_tokens": 8192}
        found["measurements"] |= {"loss_tokens": count}

    return Record(factors=HEADS, change=change)


def losing(level, seeds, beside="", status="diverged"):
    """Trainings with a level, and perhaps beside another, that diverge at some seeds."""

    def state(levels, seed):
        is_lost = {level, beside or level} <= {*levels.values()} and seed in seeds
        return status if is_lost else "done"

    def time_alone(found, *_):
        found["provenance"]["timings"] = "exclusive"

    return Record(factors=PLACES, seeds=tuple(range(6)), status=state, change=time_alone)


def timed(timings="exclusive", apart=False, device="cpu"):
    """Heads that are slower; ``apart`` measures them after all others, on ``device``."""

    def change(found, levels, seed):
        is_mqa = levels["heads"] == "mqa"
        how = timings if timings != "some" else "exclusive" if seed else "shared"
        finished = f"2026-01-02T0{3 + (apart and is_mqa)}:{seed:02d}:30Z"
        found["provenance"] |= {"timings": how, "finished": finished}
        found["provenance"]["device"] = device if is_mqa else "cpu"
        found["measurements"]["tpot_ms_p50"] = 1 + 0.5 * is_mqa + 0.01 * seed**2

    return Record(factors=HEADS, change=change)


TIMED_SECTIONS = ("effects", "pareto", "speed")
ACCURACIES = ("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_served")
PLACES = {**HEADS, "position": ("learned", "rope")}
LOST_SECTIONS = ("divergence", "effects", "cells")
SERVING = ("plain", "coarse", "tied")
FULL_SECTIONS = (
    "hellaswag", "serving-gap", "memory", "speed", "roofline", "benchmark-curves",
    "starts", "equal-memory",
)  # fmt: skip
RECORDS = {
    "report": (GoldenRecord(), SECTIONS),
    "full": (FullRecord(), FULL_SECTIONS),
    "fraction": (
        Record(factors=dict.fromkeys("abcd", ("off", "on")), effects=EVEN, exclude=is_odd),
        ("effects", "interactions", "design"),
    ),
    "partial": (Record(factors=SMALL, status=half_missing), ("answer",)),
    "missing": (Record(factors=SMALL, status=lambda *_: "missing"), ("answer",)),
    "once": (Record(factors=SMALL, seeds=(0,)), ("answer",)),
    "no-reference": (Record(factors=SMALL, status=lose_mha), ("answer",)),
    "longer-text": (Record(factors=SMALL, change=one_shot_of_more), ("cells", "serving-gap")),
    "rounding": (Record(factors={"serving": SERVING}, change=round_off), ("effects",)),
    "wrong-memory": (Record(factors=HEADS, change=store_more), ("memory",)),
    "mixed": (Record(factors=HEADS, change=mix_code), ("provenance",)),
    "at-chance": (accuracies(0.3, 0.37, 0.2), ("hellaswag", "pareto")),
    "above-chance": (accuracies(0.6, 0.6, 0.6), ("hellaswag", "pareto")),
    "leaked": (leaked(0.305), ("provenance",)),
    "not-leaked": (leaked(0.0058), ("provenance",)),
    "bigrams-win": (beats_bigrams_by(-0.01), ("answer",)),
    "bigrams-lose": (beats_bigrams_by(0.05), ("answer",)),
    "other-tokens": (scored_tokens(16_384), ("curves",)),
    "same-tokens": (scored_tokens(8192), ("curves",)),
    "diverged-once": (losing("rope", [2], "mha"), LOST_SECTIONS),
    "failed-once": (losing("rope", [2], "mha", "failed"), LOST_SECTIONS),
    "diverged-both": (losing("rope", [0, 1]), LOST_SECTIONS),
    "diverged-baseline": (losing("mha", [0, 1, 2]), LOST_SECTIONS),
    "diverged-always": (losing("mqa", range(6)), LOST_SECTIONS),
    "timed-alone": (timed(), TIMED_SECTIONS),
    "timed-together": (timed("shared"), TIMED_SECTIONS),
    "timed-mixed": (timed("some"), TIMED_SECTIONS),
    "timed-unknown": (timed(None), TIMED_SECTIONS),
    "timed-apart": (timed(apart=True), TIMED_SECTIONS),
    "timed-devices": (timed(device="H200"), TIMED_SECTIONS),
    "matched": (MatchedRecord(), ("matched",)),
}


MARKS = {"report": needs("looks")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in RECORDS])
def test_the_report_is_the_golden_one(tmp_path, name):
    record, sections = RECORDS[name]
    check_golden(GOLDEN / f"{name}.txt", markdown(load(record, tmp_path, *sections)))
