"""A made record of trials that tried how many sequences fit."""

from tests.report.full_record import line
from tests.support.record_factory import Record

FITTING = {("mha", 0): (30, 40), ("mha", 1): (34, 40), ("mqa", 0): (128, 130)}


def add_lines(result, levels, seed):
    if result["status"] == "done":
        tried, by_formula = FITTING[levels["heads"], seed]
        place = {"prompt_tokens": 96, "context_length": 128, "note": "8,000 bytes given"}
        result["benchmark"] = [
            line("limit", "largest_batch", tried, **place),
            line("limit", "largest_batch_formula", by_formula, **place),
        ]


RECORD = Record(
    factors={"heads": ("mha", "mqa")},
    seeds=(0, 1),
    status=lambda levels, seed: "done" if (levels["heads"], seed) in FITTING else "failed",
    change=add_lines,
)
