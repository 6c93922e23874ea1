"""Looks on the command line: what a plan costs at least and at most, and where a sweep is."""

import json

import pytest

from tests.support.stub_looks import KnownRun
from tests.support.tiny_sweep import SWEEP, run_kvlab, tiny_sweep_folder

SUBMIT = ("submit", "s.yaml", "--executor", "inline", "--no-report")


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    """What happens to trials of the sweep in this folder; by default nothing."""
    script = {}
    monkeypatch.setattr(
        "kvlab.cli.commands.submit.run_task",
        lambda task, store, **_: KnownRun(store, script=script)(task),
    )
    with tiny_sweep_folder(tmp_path, SWEEP + "seeds: {looks: [2, 4, 6]}\n"):
        yield script


def test_a_plan_shows_the_least_and_the_most_and_submit_what_each_look_decides():
    code, text, _ = run_kvlab("plan", "s.yaml")
    assert code == 0
    assert "This is look 1 of 3" in text
    assert "4 trials, 4 trainings" in text
    assert "The most, if nothing is decided before the last: 12 trials, 12 trainings." in text
    facts = json.loads(run_kvlab("plan", "s.yaml", "--json")[1])
    assert (len(facts["trials"]), facts["at_most"]["trials"]) == (4, 12)
    assert facts["at_most"]["budget"]["trials"] == 12
    assert facts["stage"] == {"name": "look 1 of 3", "number": 1, "is_last": False}
    code, text, error = run_kvlab(*SUBMIT)
    assert code == 0, error
    assert "s, look 1 of 3: 4 trials" in text
    assert "look 1 of 3, 2 seeds: nothing new is decided" in text
    assert "look 2 of 3, 4 seeds: heads=mqa worse: +0." in text
    assert "8 done, 0 failed" in text
    assert "stage: all looks taken" in run_kvlab("status", "s")[1]
    assert "All looks taken: nothing more is to be decided." in run_kvlab("plan", "s.yaml")[1]
