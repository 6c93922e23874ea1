"""A search on a cluster whose machines do not share its store, begun or resumed."""

from dataclasses import replace

import pytest

from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.tiny_sweep import call, tiny_place

SEARCH = """\
question: Which learning rate?
experiment: e.yaml
search:
  ranges:
    training.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  objectives: [loss]
  trials: %d
"""


class Far(InlineExecutor):
    """A cluster with one machine that sees other folders than the driver."""

    def run_on_all_machines(self, task, argument):
        return {"far": task(argument.replace("runs", "nowhere"))}


@pytest.fixture
def place(tmp_path):
    with tiny_place(tmp_path, SEARCH % 1) as folder:
        yield folder


def test_the_store_is_tried_also_when_the_base_is_done(place, monkeypatch):
    code, out, _ = call("submit", "s.yaml", "--executor", "inline", "--no-report")
    assert code == 0
    assert "0 ended before, 1 to run and what the search suggests on this process" in out
    (place / "s.yaml").write_text(SEARCH % 2)
    far = replace(EXECUTORS["ray"], make=lambda run, _: Far(run))
    monkeypatch.setitem(EXECUTORS, "ray", far)
    before = sorted(place.glob("runs/trials/*"))
    code, out, error = call("submit", "s.yaml", "--address", "far:6379", "--no-report")
    assert code == 2
    assert "is not shared by 1 of 1 machines of the cluster: far has no" in error
    assert "nothing is missing" not in out
    assert sorted(place.glob("runs/trials/*")) == before
