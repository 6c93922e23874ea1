"""How many trials a search may still suggest, and what they cost."""

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
