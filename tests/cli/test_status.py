"""`kvlab status` of a sweep in the middle of its work."""

import json
import os

from kvlab.cli.main import main
from kvlab.fs.atomic_files import write_json
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.store import Store
from kvlab.sweep.driver.driver_registry import join_sweep
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, drive, tiny_plan


def test_status_shows_counts_rate_time_left_failures_and_drivers(tmp_path, capsys):
    store, planned = Store(tmp_path / "runs"), tiny_plan(tmp_path)
    bad, again = planned.trials[1].trial.id, planned.trials[2].trial.id
    description = describe_sweep(planned, yaml="", experiment_yaml="", command="kvlab submit")
    run = StubRun(store.path, script={(bad, "measure", 0): "bug"})
    drive(planned, store, run, description=description)
    (store.trial_directory(again) / "result.json").unlink()  # as if it ran now
    state = {"stage": "training", "step": 5, "steps": 20, "tokens_per_second": 1234.0}
    write_json(store.trial_directory(again) / "progress.json", {**state, "seconds_left": 9.0})
    command = ["status", "s", "--store", str(store.path)]
    with store.trial_lock(again).hold():
        assert main(command) == main([*command, "--json"]) == 0
    text, brace, facts = capsys.readouterr().out.partition("\n{\n")
    lines, facts = text.splitlines(), json.loads(brace + facts)
    assert lines[0] == "s: 8 trials: 6 done, 1 failed, 1 running; no driver is running"
    assert lines[1].startswith("rate: ")
    assert "trials an hour, 1,234 tokens/s in training, about " in lines[1]
    failed = next(line for line in lines if line.startswith("failed"))
    assert "bug: ValueError: no way to measure" in failed
    assert f"(kvlab logs {bad[:8]})" in failed
    assert facts["pace"]["tokens_per_second"] == 1234
    assert 0 < facts["pace"]["seconds_left"] <= 9
    assert facts["drivers"] == []
    path = store.trial_directory(bad) / "result.json"
    result = read_sealed_json(path)
    forged = {**result["error"], "type": "Value\ndone    forged"}
    write_sealed_json(path, {**result, "error": forged})
    assert main(command) == 0
    assert "\ndone    forged" not in capsys.readouterr().out, "no line of its own"
    with (
        join_sweep(store, "s", description, exclusive=False),
        join_sweep(store, "s", None, exclusive=False),
    ):
        assert main(command) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.count(f"by process {os.getpid()} since ") == 2
