"""What MLflow's page opens with: the runs of a sweep, with columns that differ between them."""

import base64
import json
import zlib

from kvlab.track.run_description import cell_name
from kvlab.track.sweep_summary import experiment_tags, view_address
from tests.support.record_factory import Record

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
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    state = page_state(tags)
    assert state["selectedColumns"] == [
        "params.`heads`", "params.`sharing`", "params.`seed`",
        "metrics.`quality/loss_served`", "metrics.`kv/bytes`", "metrics.`speed/tpot_ms_p50`",
    ]  # fmt: skip
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`quality/loss_served`", True)
    front, bars, curves = state["compareRunCharts"]
    assert (front["xaxis"]["key"], front["yaxis"]["key"]) == ("kv/bytes", "quality/loss_served")
    assert (bars["metricKey"], curves["metricKey"]) == (
        "quality/loss_served", "train/validation_loss",
    )  # fmt: skip
    (section,) = state["compareRunSections"]
    assert {chart["metricSectionId"] for chart in (front, bars, curves)} == {section["uuid"]}
    grouped = page_state(tags, "kvlab-cells")["groupBy"]["groupByKeys"]
    assert grouped == [{"mode": "tag", "groupByData": "kvlab.cell"}]
    assert view_address("http://h:1/", "7") == (
        "http://h:1/#/experiments/7/runs?viewStateShareKey=kvlab-trials"
        "&workflowType=machine_learning"
    )


def test_what_is_better_when_higher_comes_first_and_many_factors_fit_the_longest_tag():
    factors = {f"a-rather-long-name-of-factor-{n}": ("a", "b") for n in range(30)}
    sweep = {"name": "s", "factors": factors, "baseline": dict.fromkeys(factors, "a")}
    tags = experiment_tags(sweep, "recall_acc_served")
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
