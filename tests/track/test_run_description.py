"""Names of metrics in MLflow: every metric of the record once, in a group, as the page says."""

import math
import re
from pathlib import Path

import pytest

import kvlab.track
from kvlab.store.metrics import METRICS
from kvlab.track.run_description import DUPLICATES, RENAMED, SIZES, tracked_metrics, tracked_name
from tests.support.record_factory import Record

PAGE = Path(kvlab.track.__file__).parent / "README.md"


@pytest.fixture
def result():
    return Record(factors={"heads": ("mha", "mqa")}).result({"heads": "mqa"}, 0, "done")


def test_every_metric_is_in_one_of_the_groups_and_no_two_share_a_name():
    names = [tracked_name(name) for name in METRICS]
    groups = {name.partition("/")[0] for name, _ in names}
    assert groups == {"quality", "kv", "speed", "reuse", "train"}
    assert len(set(names)) == len(names)


def test_the_page_lists_every_name_that_is_not_by_the_rule():
    text = PAGE.read_text()
    listed = re.findall(r"^\| `(\w+)`(?: \(curve\))? \| `([\w/]+)` \|$", text, re.M)
    assert dict(listed) == RENAMED
    assert all(f"`{name}`" in text for name in (*SIZES, *DUPLICATES))


def test_one_name_for_what_is_one_number(result):
    metrics = {name: value for name, value, _ in tracked_metrics(result)}
    same = [name for name, value in metrics.items() if value == result["kv"]["bytes_at_block_size"]]
    assert same == ["kv/bytes", "kv/bytes_read_per_token"], "what is read is another quantity"
    assert "quality/loss_paired" not in metrics
    result["measurements"] |= {"loss_tokens": 100, "served_tokens": 50, "loss_served": 5.0}
    metrics = {name: value for name, value, _ in tracked_metrics(result)}
    assert metrics["quality/loss_paired"] == 5.0 - result["measurements"]["serving_gap"]


def test_parts_of_the_context_and_turns_are_curves(result):
    result["measurements"] |= {f"loss_part{part}_served": 5.0 - part for part in range(1, 9)}
    result["measurements"] |= {f"reuse_hit_rate_turn{turn}": turn / 16 for turn in (1, 2, 10)}
    result["measurements"]["reuse_hit_rate"] = 0.5
    points = list(tracked_metrics(result))
    parts = [(value, step) for name, value, step in points if name.endswith("context_served")]
    assert parts == [(5.0 - part, part) for part in range(1, 9)]
    curve = [("reuse/hit_rate_by_turn", turn / 16, turn) for turn in (1, 2, 10)]
    assert [p for p in points if p[0][:6] == "reuse/"] == [("reuse/hit_rate", 0.5, None), *curve]


def test_what_is_not_a_number_is_left_out(result):
    result["measurements"] |= {"loss_served": math.nan, "ttft_ms": math.inf}
    metrics = {name: value for name, value, _ in tracked_metrics(result)}
    assert {"quality/loss_served", "speed/ttft_ms"}.isdisjoint(metrics)
    assert "quality/loss" in metrics
