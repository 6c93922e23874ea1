"""How many trials a search may still suggest, and what they cost."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.sweep.planning.budget import estimate_budget
from kvlab.sweep.search.search_history import count_remaining_suggestions
from tests.support.stub_search import SEARCH, searching


def remaining(folder, text=SEARCH, **options):
    store, search, _ = searching(folder, text, **options)
    return count_remaining_suggestions(search.plan, store)


def test_a_search_counts_as_many_suggestions_as_its_budgets_allow(tmp_path):
    assert remaining(tmp_path) == 12
    one = searching(tmp_path)[1].plan.trials[0].flops
    text = SEARCH.replace("trials: 12", f"trials: 12\n  flops: {2.5 * one}")
    assert remaining(tmp_path / "b", text) == 3  # the third passes the budget
    assert remaining(tmp_path / "c", SEARCH.replace("trials: 12", "hours: 2")) == 0


def test_what_has_been_trained_is_not_counted_again(tmp_path):
    stopped = searching(tmp_path, stop_at=7)  # in the midst of the fourth trial
    stopped[2].run()
    suggestions = remaining(tmp_path)
    ended = sum(point.observation.state == "ok" for point in stopped[1].suggestions)
    assert 0 < ended < 12
    assert suggestions == 12 - ended
    searching(tmp_path)[2].run()
    assert remaining(tmp_path) == 0


def test_the_totals_are_the_bases_as_often(tmp_path):
    store, search, _ = searching(tmp_path)
    base = search.plan.trials[0]
    costs = estimate_budget(search.plan, store, suggestions=12, rate=1e6)
    assert (costs.trials, costs.trainings, costs.suggestions) == (13, 13, 12)
    assert (costs.flops, costs.tokens) == (13 * base.flops, 13 * base.tokens)
    assert costs.hours == pytest.approx(13 * base.flops / 1e6 / 3600)


def test_the_command_says_that_it_is_an_estimate(tmp_path, capsys):
    searching(tmp_path)
    command = ["plan", str(tmp_path / "s.yaml"), "--store", str(tmp_path / "runs")]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "Still to run: at most 13 trials, 13 trainings" in text
    assert "12 of them are suggestions to come, each taken to cost what the base does." in text
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["budget"]
    assert (facts["trials"], facts["suggestions"]) == (13, 12)
