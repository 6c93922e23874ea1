"""What a sweep has computed: shared trainings once, tuning, and what no record says."""

import shutil
from pathlib import Path

import pytest

from kvlab.analysis.compute import measure_compute
from kvlab.analysis.study import Study
from kvlab.store.record_archive import extract_archive
from tests.support.extensions import needs
from tests.support.record_factory import Record

TUNED = Path(__file__).parents[2] / "reports" / "reductions" / "record.tar.xz"


@pytest.mark.parametrize(
    ("changes", "share", "device", "seconds"),
    [
        ({}, 1, "CPU core", 30),
        # more than the trial took: it was there before
        ({"training_record": {"seconds": 300.0}}, 1, "CPU core", 300 + 30),
        # half of the steps are another training's
        ({"training_record": {"branched_at": 75}}, 0.5, "CPU core", 5 + 25),
        # the last attempt took 60 of 150 steps
        ({"training_record": {"resumed_from": [30, 90]}}, 1, "CPU core", 10 + 26),
        ({"resources": {"cpus": 4}}, 1, "CPU core", 4 * 30),
        ({"resources": {"gpus": 0.5}}, 1, "GPU", 0.5 * 30),
        ({"resources": {"gpus": 2}}, 1, "GPU", 2 * 30),
        # both were timed again, in turns, in one minute
        ({"timing": True, "resources": {"cpus": 2}}, 1, "CPU core", 2 * 30 + 60),
    ],
)
def test_steps_count_where_they_were_taken_and_hours_of_all_devices(
    tmp_path, changes, share, device, seconds
):
    """Of trials of 30 seconds, whose trainings take 10 of them for their steps."""

    def change(result, _levels, _seed):
        result["training_record"] |= changes.get("training_record", {})
        result["experiment"]["resources"] = changes.get("resources", {})
        if changes.get("timing"):
            started, finished = "2026-01-01T00:00:00+00:00", "2026-01-01T00:01:00+00:00"
            result["timing"] = {"started": started, "finished": finished}

    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,), change=change)
    found = measure_compute(Study.load(record.write(tmp_path), "made"))[0]
    assert found.flops == pytest.approx(2 * share * 1e12)
    assert found.hours == {device: pytest.approx(2 * seconds / 3600)}


def test_a_training_that_pruned_trials_share_counts_once(tmp_path):
    """One is pruned after 60 of 150 steps, one after 90: both have taken steps of one training."""

    def change(result, levels, _seed):
        result["training"] = "0" * 16
        result |= {"status": "pruned", "pruned": {"step": 60, "steps": 150, "loss": 3.0}}
        result["pruned"]["step"] += 30 * (levels["heads"] == "mqa")
        del result["training_record"]

    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,), change=change)
    found = measure_compute(Study.load(record.write(tmp_path), "made"))[0]
    assert found.flops == pytest.approx(0.6e12)


@needs("tuning")
def test_tuning_is_a_part_of_the_whole_and_missed_where_it_is_gone(tmp_path):
    store = extract_archive(TUNED, tmp_path / "record")
    total, parts = measure_compute(Study.load(store, "reductions"))
    tuning = parts["tuning"]
    assert (tuning.trials, tuning.trainings, tuning.absent) == (33, 33, 0)
    for trial in store.sweep_trials("reductions")[:33]:  # those of the tuning come first
        shutil.rmtree(store.trial_directory(trial))
    rest, parts = measure_compute(Study.load(store, "reductions"))
    gone = parts["tuning"]
    assert (gone.trials, gone.absent, rest.trials) == (0, 33, total.trials - 33)
    assert rest.flops == total.flops - tuning.flops
