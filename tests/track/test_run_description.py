"""Names of metrics and cells in MLflow, and the views that its page opens with."""

import base64
import json
import math
import os
import re
import zlib
from pathlib import Path

import kvlab.track
from kvlab.own_extensions import name_members
from kvlab.store.metrics import METRICS
from kvlab.track.run_description import (
    DUPLICATES,
    RENAMED,
    SIZES,
    cell_name,
    tracked_metrics,
    tracked_name,
)
from kvlab.track.sweep_summary import describe_sweep, experiment_tags, view_address
from tests.support.record_factory import Record


def track(**measurements):
    """Return the result of a cell with more measurements, and its metrics as MLflow gets them."""
    result = Record(factors={"heads": ("mha", "mqa")}).result({"heads": "mqa"}, 0, "done")
    result["measurements"] |= measurements
    return result, list(tracked_metrics(result))


def test_every_metric_is_in_one_of_the_groups_and_the_page_lists_what_is_not_by_the_rule():
    names = [tracked_name(name) for name in METRICS]
    groups = {name.partition("/")[0] for name, _ in names}
    assert groups == {"quality", "kv", "speed", "train", *name_members("tracked_groups")}
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


def test_parts_of_the_context_are_curves():
    _, points = track(**{f"loss_part{part}_served": 5.0 - part for part in range(1, 9)})
    parts = [(value, step) for name, value, step in points if name.endswith("context_served")]
    assert parts == [(5.0 - part, part) for part in range(1, 9)]


GOLDEN = Path(__file__).with_name("golden_views.json")
SEARCH = {
    "name": "s", "factors": {"point": ["base", "p0000"]}, "baseline": {"point": "base"},
    "patches": {"point": {"base": {}, "p0000": {"model.n_kv_head": 2, "serving.tie": "adjacent:2"}}},
}  # fmt: skip


def page_state(tags, key="kvlab-trials"):
    """Read a view as the page does."""
    view = json.loads(tags[f"mlflow.sharedViewState.{key}"])
    header, _, state = view["state"].partition(";")
    assert header == "deflate"
    return json.loads(zlib.decompress(base64.b64decode(state)))


def test_the_page_opens_on_runs_with_factors_loss_and_cache_the_best_first():
    record = Record(factors={"heads": ("mha", "mqa"), "sharing": ("none", "tied")})
    tags = experiment_tags(record.description(record.cells()), "loss_served")
    views = {key: page_state(tags, key) for key in ("kvlab-trials", "kvlab-cells")}
    text = json.dumps({"kind": tags["mlflow.experimentKind"], **views}, indent=1) + "\n"
    if os.environ.get("KVLAB_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "KVLAB_WRITE_GOLDEN=1 writes it again; review its diff"
    assert view_address("http://h:1/", "7") == (
        "http://h:1/#/experiments/7/runs?viewStateShareKey=kvlab-trials"
        "&workflowType=machine_learning"
    )


def test_what_is_better_when_higher_comes_first_and_many_factors_fit_the_longest_tag():
    factors = {f"a-rather-long-name-of-factor-{n}": ("a", "b") for n in range(30)}
    sweep = {"name": "s", "factors": factors, "baseline": dict.fromkeys(factors, "a")}
    tags = experiment_tags(sweep, "hellaswag_acc_norm_served")
    assert page_state(tags)["orderByAsc"] is False
    assert tags["mlflow.experiment.primaryMetric.greaterIsBetter"] == "true"
    assert max(map(len, tags.values())) < 5000


def test_cells_are_named_by_their_settings_in_a_search_and_by_factors_that_share_a_level():
    columns = page_state(experiment_tags(SEARCH, "loss_served"))["selectedColumns"]
    assert columns[:2] == ["params.`model.n_kv_head`", "params.`serving.tie`"]
    assert cell_name(SEARCH, {"point": "p0000"}) == "n_kv_head=2 tie=adjacent:2"
    assert cell_name(SEARCH, {"point": "base"}) == "baseline"
    base = {"a": "off", "b": "off"}
    sweep = {"factors": dict.fromkeys("ab", ("off", "on")), "baseline": base}
    assert [cell_name(sweep, {**base, "a": a}) for a in ("on", "off")] == ["a=on", "baseline"]


def test_the_note_is_the_answer_of_the_report_as_far_as_it_fits(tmp_path):
    parts = ["![front](figures/pareto.svg)", "a" * 2000, "b" * 2000, "c" * 2000]
    page = "\n\n".join(["# s", "## The answer", *parts, "## Cells", "d"])
    (tmp_path / "report.md").write_text(page)
    end = "More is in the report, among this run's artifacts."
    note = describe_sweep({"question": "q"}, "8 done", tmp_path)
    assert note == "\n\n".join([parts[1], parts[2], end, "8 done"])
    (tmp_path / "report.md").write_text(page.replace("answer", "method"))
    assert describe_sweep({"question": "q"}, "8 done", tmp_path) == "q\n\n8 done"
