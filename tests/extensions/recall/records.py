"""A made record of trials that answered questions of the recall source."""

from tests.support.record_factory import Record

SHARES = {"none": 0.999, "trained": 0.998, "tied": 0.6}


def answer(result, levels, seed):
    share = SHARES[levels["sharing"]] - 0.0004 * seed - 0.0003 * (levels["heads"] == "mqa")
    groups = {"recall": share, "recall_4_pairs": share, "recall_16_pairs": share - 0.1}
    groups |= {"recall_8_back": share, "recall_32_back": share - 0.2}
    measured = result["measurements"]
    for name, value in groups.items():
        measured |= {name: value, f"{name}_served": value - 0.001, f"{name}_items": 4000}
    measured["recall_chance"] = 1 / 16


RECORD = Record(seeds=(0, 1, 2, 3), change=answer)
