"""What has changed since trials finished: beside the plan of a sweep, and why a trial has no result."""

from unittest import mock

import pytest

from kvlab.data.data_dir import get_data_dir
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.extensions.explain.changes import find_nearest_trial, find_unmatched_trials
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import SWEEP, StubRun, drive, tiny_plan
from tests.support.tiny_sweep import run_kvlab, tiny_sweep_folder


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seeds: [0, 1]", "seeds: [5]", {"seed": (5, mock.ANY)}),
        ("mha: {}", "mha: {training.learning_rate: 1e-3}",
         {"training.learning_rate": (1e-3, 6e-4), "training.final_learning_rate": (1e-4, 6e-5)}),
        ("plain: {}", "plain: {serving.kv_dtype: int8}", {"serving.kv_dtype": ("int8", "model"), "serving.compared_with": ("float32", None)}),
    ],
)  # fmt: skip
def test_the_fields_that_differ_from_the_nearest_finished_trial(
    tmp_path, old, new, expected, driven
):
    first = tiny_plan(tmp_path, driven, SWEEP.replace(old, new)).trials[0].trial
    nearest, differences = find_nearest_trial(first, driven)
    assert {key: (here, there) for key, here, there in differences} == expected
    assert driven.status(nearest) == "done"
    assert find_nearest_trial(first, Store(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("old", "new", "count", "field"),
    [
        ("mqa: {", "mqa: {training.learning_rate: 1e-3, ", 4, "training.learning_rate"),
        ("seeds: [0, 1]", "seeds: [0]", 4, None),
    ],
)
def test_finished_trials_that_no_longer_match_are_counted_with_the_reason(
    tmp_path, old, new, count, field, driven
):
    same = tiny_plan(tmp_path, driven, SWEEP.replace("{}", "{resources.cpus: 0.5}", 1))
    assert find_unmatched_trials(same, driven) == []
    groups = find_unmatched_trials(tiny_plan(tmp_path, driven, SWEEP.replace(old, new)), driven)
    assert sum(group.count for group in groups) == count
    for group in groups:
        keys = None if group.differences is None else {key for key, _, _ in group.differences}
        assert keys is field is None or field in keys


def test_another_text_is_named_with_the_key_that_selects_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.data.dataset_preparation.SMALL_TEXT_BYTES", 0)  # none is prepared
    with tiny_sweep_folder(tmp_path) as folder:
        store = Store(folder / "runs")
        planned = plan(load_sweep(folder / "s.yaml"))
        described = describe_sweep(planned, yaml="", experiment_yaml="", command="")
        drive(planned, store, StubRun(store.path), description=described)
        prepared = get_data_dir() / "datasets"
        prepared.rename(folder / "away")
        assert "State: 2 done." in run_kvlab("plan", "s.yaml")[1], "the record knows the text"
        (folder / "away").rename(prepared)
        spec = folder / "e.yaml"
        spec.write_text(spec.read_text().replace("fraction: 0.2", "fraction: 0.3"))
        out = run_kvlab("plan", "s.yaml")[1]
        assert "so the ids will change" in out
        assert "no longer match" not in out, "the text is not known yet"
        prepare_dataset(load_experiment("e.yaml").data)
        out = run_kvlab("plan", "s.yaml")[1]
        assert "2 finished trials no longer match this sweep, as data.digest" in out
        out = run_kvlab("plan", "s.yaml", "--why")[1]
        assert "data.validation_fraction: 0.3 now, 0.2 then" in out
