"""Names of metrics in MLflow: every metric of the record once, in a group, as the page says."""

import math
import re
from pathlib import Path

import kvlab.track
from kvlab.store.metrics import METRICS
from kvlab.track.run_description import DUPLICATES, RENAMED, SIZES, tracked_metrics, tracked_name
from tests.support.record_factory import Record


def track(**measurements):
    """Return the result of a cell with more measurements, and its metrics as MLflow gets them."""
    result = Record(factors={"heads": ("mha", "mqa")}).result({"heads": "mqa"}, 0, "done")
    result["measurements"] |= measurements
    return result, list(tracked_metrics(result))


def test_every_metric_is_in_one_of_the_groups_and_the_page_lists_what_is_not_by_the_rule():
    names = [tracked_name(name) for name in METRICS]
    groups = {name.partition("/")[0] for name, _ in names}
    assert groups == {"quality", "kv", "speed", "reuse", "train"}
    assert len(set(names)) == len(names)
    text = (Path(kvlab.track.__file__).parent / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+)`(?: \(curve\))? \| `([\w/]+)` \|$", text, re.M)
    assert dict(listed) == RENAMED
    assert all(f"`{name}`" in text for name in (*SIZES, *DUPLICATES))


def test_one_name_for_what_is_one_number_and_none_for_what_is_no_number():
    result, points = track(ttft_ms=math.inf)
    metrics = {name: value for name, value, _ in points}
    same = [name for name, value in metrics.items() if value == result["kv"]["bytes_at_block_size"]]
    assert same == ["kv/bytes", "kv/bytes_read_per_token"], "what is read is another quantity"
    assert {"quality/loss_paired", "speed/ttft_ms"}.isdisjoint(metrics)
    result, points = track(loss_tokens=100, served_tokens=50, loss_served=5.0)
    gap = result["measurements"]["serving_gap"]
    assert ("quality/loss_paired", 5.0 - gap, None) in points


def test_parts_of_the_context_and_turns_are_curves():
    _, points = track(
        **{f"loss_part{part}_served": 5.0 - part for part in range(1, 9)},
        **{f"reuse_hit_rate_turn{turn}": turn / 16 for turn in (1, 2, 10)},
        reuse_hit_rate=0.5,
    )
    parts = [(value, step) for name, value, step in points if name.endswith("context_served")]
    assert parts == [(5.0 - part, part) for part in range(1, 9)]
    curve = [("reuse/hit_rate_by_turn", turn / 16, turn) for turn in (1, 2, 10)]
    assert [p for p in points if p[0][:6] == "reuse/"] == [("reuse/hit_rate", 0.5, None), *curve]
