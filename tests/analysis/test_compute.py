"""What a sweep has computed: shared trainings once, tuning, and what no record says."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from kvlab.analysis.compute import measure_compute
from kvlab.analysis.study import Study
from kvlab.store.record_archive import extract_archive
from tests.support.record_factory import Record
from tests.support.search_record import EVERY_OUTCOME

SMALL = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
TUNED = Path(__file__).parents[2] / "reports" / "reductions" / "record.tar.xz"


class Timed(Record):
    """Trials of 30 seconds; one of ``none`` takes 10 of them for the steps of its training."""

    training_record: dict = {}  # noqa: RUF012
    resources: dict = {}  # noqa: RUF012

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        if status == "done":
            found["training_record"] |= self.training_record
        found["experiment"]["resources"] = self.resources
        return found


def measure(record, folder):
    return measure_compute(Study.load(record.write(folder), "made"))[0]


def test_a_training_that_trials_share_counts_once(tmp_path):
    found = measure(Timed(factors=SMALL, seeds=(0, 1)), tmp_path)
    assert (found.trials, found.trainings, found.flops) == (8, 4, 4e12)
    assert found.hours == {"CPU core": pytest.approx(8 * 30 / 3600)}
    assert (found.without_flops, found.without_hours, found.absent) == (0, 0, 0)


@pytest.mark.parametrize(
    ("training_record", "share", "seconds"),
    [
        ({}, 1, 30),
        ({"seconds": 300.0}, 1, 300 + 30),  # more than the trial took: it was there before
        ({"branched_at": 75}, 0.5, 5 + 25),  # half of the steps are another training's
        ({"resumed_from": [30, 90]}, 1, 10 + 26),  # the last attempt took 60 of 150 steps
    ],
)
def test_steps_count_where_they_were_taken(tmp_path, training_record, share, seconds):
    record = Timed(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    record.training_record = training_record
    found = measure(record, tmp_path)
    assert found.flops == pytest.approx(2 * share * 1e12)
    assert found.hours["CPU core"] == pytest.approx(2 * seconds / 3600)


@pytest.mark.parametrize(
    ("resources", "device", "count"),
    [({"cpus": 4}, "CPU core", 4), ({"gpus": 0.5}, "GPU", 0.5), ({"gpus": 2}, "GPU", 2)],
)
def test_hours_are_of_all_devices_that_a_trial_holds(tmp_path, resources, device, count):
    record = Timed(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    record.resources = resources
    found = measure(record, tmp_path)
    assert found.hours == {device: pytest.approx(2 * count * 30 / 3600)}


def test_what_ended_without_a_result_is_named(tmp_path):
    states = {("mqa", 0): "diverged", ("mqa", 1): "failed"}
    record = Timed(
        factors={"heads": ("mha", "mqa")},
        seeds=(0, 1),
        status=lambda levels, seed: states.get((levels["heads"], seed), "done"),
    )
    found = measure(record, tmp_path / "failed")
    assert (found.flops, found.without_flops, found.without_hours) == (2e12, 2, 0)
    assert found.hours["CPU core"] == pytest.approx(4 * 30 / 3600), "they took their time"
    search = measure(EVERY_OUTCOME, tmp_path / "search")
    assert search.without_hours == 1
    assert search.flops % 1e12 == pytest.approx(38 / 150 * 1e12), "pruned after step 38"


def test_tuning_is_a_part_of_the_whole_and_missed_where_it_is_gone(tmp_path):
    store = extract_archive(TUNED, tmp_path / "record")
    flops, seconds = {}, {True: 0.0, False: 0.0}
    tuned = set(store.sweep_trials("reductions")[:33])  # those of the tuning come first
    for path in store.path.glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        is_tuning = result["trial"] in tuned
        flops[is_tuning, result["training"]] = result["model"]["training_flops"]
        when = [
            datetime.fromisoformat(result["provenance"][key]) for key in ("started", "finished")
        ]
        seconds[is_tuning] += (when[1] - when[0]).total_seconds()
    sessions = json.loads((store.sweep_directory("reductions") / "timings.json").read_text())
    for one in sessions["sessions"]:
        when = [datetime.fromisoformat(one[key]) for key in ("started", "finished")]
        seconds[False] += (when[1] - when[0]).total_seconds()
    total, tuning = measure_compute(Study.load(store, "reductions"))
    assert (tuning.trials, tuning.trainings, tuning.absent) == (33, 33, 0)
    assert tuning.flops == sum(count for (is_tuning, _), count in flops.items() if is_tuning)
    assert total.flops == sum(flops.values())
    # a trial's start and end are whole seconds
    slack = 1.0 * total.trials / 3600
    assert tuning.hours["CPU core"] == pytest.approx(seconds[True] / 3600, abs=slack)
    assert total.hours["CPU core"] == pytest.approx(sum(seconds.values()) / 3600, abs=slack)
    for trial in tuned:
        shutil.rmtree(store.trial_directory(trial))
    rest, gone = measure_compute(Study.load(store, "reductions"))
    assert (gone.trials, gone.absent, rest.trials) == (0, 33, total.trials - 33)
    assert rest.flops == total.flops - tuning.flops
