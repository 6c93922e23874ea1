"""`kvlab status` of a sweep in the middle of its work."""

import json
import os

from kvlab.cli.main import main
from kvlab.fs.atomic_files import write_json
from kvlab.store import Store
from kvlab.sweep import Driver
from kvlab.sweep.driver.driver_registry import join_sweep
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, tiny_plan


def test_status_shows_counts_rate_time_left_and_failures(tmp_path, capsys):
    store, planned = Store(tmp_path / "runs"), tiny_plan(tmp_path)
    bad = planned.trials[1].trial.id
    describe = describe_sweep(planned, yaml="", experiment_yaml="", command="kvlab submit")
    run = StubRun(store.path, script={(bad, "measure", 0): "bug"})
    Driver(planned, store, InlineExecutor(run), description=describe).run()
    again = planned.trials[2].trial.id  # as if it ran now
    (store.trial_directory(again) / "result.json").unlink()
    state = {"stage": "training", "step": 5, "steps": 20, "tokens_per_second": 1234.0}
    write_json(store.trial_directory(again) / "progress.json", {**state, "seconds_left": 9.0})
    with store.trial_lock(again).hold():
        assert main(["status", "s", "--store", str(store.path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "s: 8 trials: 6 done, 1 failed, 1 running; no driver is running"
        assert lines[1].startswith("rate: ")
        assert "trials an hour, 1,234 tokens/s in training, about " in lines[1]
        assert lines[1].endswith(" left")
        failed = next(line for line in lines if line.startswith("failed"))
        assert "bug: ValueError: no way to measure" in failed
        assert f"(kvlab logs {bad[:8]})" in failed
        assert main(["status", "s", "--store", str(store.path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
    assert facts["pace"]["tokens_per_second"] == 1234
    assert 0 < facts["pace"]["seconds_left"] <= 9
    assert facts["drivers"] == []


def test_status_names_the_drivers(tmp_path, capsys):
    store, planned = Store(tmp_path / "runs"), tiny_plan(tmp_path)
    description = describe_sweep(planned, yaml="", experiment_yaml="", command="kvlab submit")
    with (
        join_sweep(store, "s", description, exclusive=False),
        join_sweep(store, "s", None, exclusive=False),
    ):
        assert main(["status", "s", "--store", str(store.path)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.count(f"by process {os.getpid()} since ") == 2
