"""HellaSwag outcomes from trials' lines: read fast where all are alike, and the same either way."""

import gzip
import json
import random

import pytest

from kvlab.analysis.study import Study
from kvlab.report import hellaswag_outcomes
from kvlab.report.hellaswag_outcomes import COMPARED_METRICS, parse_outcomes, read_outcomes
from tests.support.record_factory import Record

WAYS = dict(zip(COMPARED_METRICS, ("one_shot", "served"), strict=True))


def lines(items):
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def made(count, seed=0, ways=("one_shot", "served"), parts=("completion", "lmeval")):
    chance = random.Random(seed)

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


def forbid_decoding(monkeypatch):
    """Let the test fail where lines are decoded one by one."""
    monkeypatch.setattr(hellaswag_outcomes, "_decode_line", None)


@pytest.mark.parametrize("ways", [("one_shot",), ("one_shot", "served"), ("served",)])
@pytest.mark.parametrize("parts", [("completion",), ("completion", "lmeval")])
def test_lines_that_are_alike_are_not_decoded(monkeypatch, ways, parts):
    items = made(500, ways=ways, parts=parts)
    forbid_decoding(monkeypatch)
    assert parse_outcomes(lines(items)) == expected(items)
    assert all(0 < sum(right) < 500 for right in expected(items).values())


def test_an_item_as_the_evaluation_writes_it(monkeypatch):
    """A real line, so that what is read fast is what trials have."""
    line = (
        b'{"ind": 24, "label": 3, "completion": {"shortened": false, "divisors": [16, 11, 12, 14],'
        b' "one_shot": {"scores": [-101.8, -71.9, -79.5, -9.1e-05], "prediction": 1,'
        b' "prediction_norm": 3}, "served": {"scores": [-101.8, -71.9, -79.5, -93.7],'
        b' "prediction": 1, "prediction_norm": 0}}, "lmeval": {"shortened": false, "divisors":'
        b' [37, 27, 26, 36], "one_shot": {"scores": [-102.4, -72.8, -79.0, -94.7], "prediction":'
        b' 1, "prediction_norm": 3}, "served": {"scores": [-102.4, -72.8, -79.0, -94.7],'
        b' "prediction": 1, "prediction_norm": 3}}}\n'
    )
    forbid_decoding(monkeypatch)
    found = parse_outcomes(line * 2)
    assert found == dict(zip(COMPARED_METRICS, (b"\1\1", b"\0\0"), strict=True))


def unlike():
    """Records that differ from line to line in every way that JSON allows."""
    half, turned, text, large = (made(20) for _ in range(4))
    for item in half[::2]:
        del item["completion"]["served"]
    for item in turned[::3]:
        item["completion"] = dict(reversed(item["completion"].items()))
    text[3]["note"] = '"label": 1, "prediction_norm": 2}'
    large[5]["label"] = 12
    other = [dict(reversed(item.items())) for item in made(20)]
    swapped = made(20, ways=("served", "one_shot"), parts=("lmeval", "completion"))
    return {"half": half, "turned": turned, "text": text, "large": large, "other": other,
            "swapped": swapped}  # fmt: skip


@pytest.mark.parametrize("name", list(unlike()))
def test_lines_that_are_not_alike_are_read_one_by_one(name):
    items = unlike()[name]
    assert parse_outcomes(lines(items)) == expected(items)


@pytest.mark.parametrize("damage", [b"no gzip", gzip.compress(b'{"label": 1}\n[]\n', mtime=0)])
def test_of_a_whole_study_each_intact_trial_once(tmp_path, damage):
    record = Record(
        factors={"heads": ("mha", "mqa")}, items=20, seeds=(0, 1, 2),
        status=lambda _, seed: "failed" if seed == 2 else "done",
    )  # fmt: skip
    store = record.write(tmp_path)
    damaged = record.trial(record.cells()[0], 0)
    (store.trial_directory(damaged) / "items.jsonl.gz").write_bytes(damage)
    study = Study.load(store, "made")
    assert {row.trial for row in study.rows if row.status == "damaged"} == {damaged}
    bits = read_outcomes(study)
    assert bits[COMPARED_METRICS[0]].keys() == {row.trial for row in study.done_rows} - {damaged}
    for row in study.done_rows:
        levels = dict(zip(study.factors, row.levels, strict=True))
        right = expected(record.outcomes(levels, row.seed))
        assert {style: bits[style][row.trial] for style in COMPARED_METRICS} == right
