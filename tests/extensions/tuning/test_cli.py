"""A tuning on the command line: a failure of its trials, and running them again."""

import json
from pathlib import Path

from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.spec import load_experiment
from tests.support.stub_looks import KnownRun
from tests.support.tiny_sweep import SWEEP, run_kvlab, tiny_sweep_folder

SUBMIT = ("submit", "s.yaml", "--executor", "inline", "--no-report")


def test_a_failed_tuning_trial_fails_the_sweep_until_it_is_retried(tmp_path, monkeypatch):
    script = {}
    monkeypatch.setattr(
        "kvlab.cli.commands.submit.run_task",
        lambda task, store, **_: KnownRun(store, script=script)(task),
    )
    with tiny_sweep_folder(tmp_path, SWEEP):
        tune = "tune: {training.learning_rate: [1e-3, 2e-3, 4e-3], seeds: [100]}\n"
        Path("s.yaml").write_text(f"{SWEEP}seeds: [0]\n{tune}")
        prepare_dataset(load_experiment("e.yaml").data)  # the ids are known from then on
        bad = json.loads(run_kvlab("plan", "s.yaml", "--json")[1])["trials"][0]["trial"]
        script[bad, "measure", 0] = "bug"
        code, text, _ = run_kvlab(*SUBMIT)
        assert (code, "1 failed" in text, f"  {bad}  bug" in text) == (1, True, True)
        assert text.count("; 1 tuning trial failed") == 1
        assert "1 failed" in run_kvlab("status", "s")[1]
        assert run_kvlab(*SUBMIT)[0] == 1, "nothing new has run, and the failure is still there"
        script.clear()
        code, text, error = run_kvlab(*SUBMIT, "--retry-failed")
        assert (code, "s, tuning 1" in text, ", 0 failed" in text) == (0, True, True), error
        assert "failed" not in run_kvlab("status", "s")[1]
