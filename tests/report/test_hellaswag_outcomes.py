"""HellaSwag outcomes from trials' lines, against the items one by one."""

import json
import random

import pytest

from kvlab.analysis.study import Study
from kvlab.report.hellaswag_outcomes import COMPARED_METRICS, parse_outcomes, read_outcomes
from tests.support.record_factory import Record

WAYS = dict(zip(COMPARED_METRICS, ("one_shot", "served"), strict=True))


def lines(items):
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def made(count, ways=("one_shot", "served"), parts=("completion", "lmeval")):
    chance = random.Random(0)

    def scored():
        prediction = {"prediction": chance.randrange(4), "prediction_norm": chance.randrange(4)}
        return {"scores": [chance.uniform(-90, -10) for _ in range(4)], **prediction}

    return [
        {"ind": index, "label": chance.randrange(4),
         **{part: {"shortened": chance.random() < 0.1, "divisors": [12, 9, 14, 10],
                   **{way: scored() for way in ways}} for part in parts}}
        for index in range(count)
    ]  # fmt: skip


def expected(items):
    """One by one, from the items themselves."""
    found = {}
    for style, way in WAYS.items():
        answered = [
            (one["completion"][way], one["label"]) for one in items if way in one["completion"]
        ]
        if answered:
            found[style] = bytes(a["prediction_norm"] == label for a, label in answered)
    return found


@pytest.mark.parametrize("ways", [("one_shot",), ("one_shot", "served"), ("served",)])
def test_outcomes_are_those_of_the_items(ways):
    items = made(500, ways=ways)
    assert parse_outcomes(lines(items)) == expected(items)
    assert all(0 < sum(right) < 500 for right in expected(items).values())
    assert parse_outcomes(b"") == {}


def test_a_line_of_another_form_is_refused():
    with pytest.raises(ValueError, match="a line is not as the evaluation writes it"):
        parse_outcomes(lines(made(20)) + b'{"label": 1}\n')


def test_of_a_whole_study_each_intact_trial_once(tmp_path):
    record = Record(
        factors={"heads": ("mha", "mqa")}, items=20, seeds=(0, 1, 2),
        status=lambda _, seed: "failed" if seed == 2 else "done",
    )  # fmt: skip
    store = record.write(tmp_path)
    damaged = record.trial(record.cells()[0], 0)
    (store.trial_directory(damaged) / "items.jsonl.gz").write_bytes(b"no gzip")
    study = Study.load(store, "made")
    assert {row.trial for row in study.rows if row.status == "damaged"} == {damaged}
    bits = read_outcomes(study)
    assert bits[COMPARED_METRICS[0]].keys() == {row.trial for row in study.done_rows} - {damaged}
    for row in study.done_rows:
        levels = dict(zip(study.factors, row.levels, strict=True))
        right = expected(record.outcomes(levels, row.seed))
        assert {style: bits[style][row.trial] for style in COMPARED_METRICS} == right
