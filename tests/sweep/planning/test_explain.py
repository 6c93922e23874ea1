"""Explanations: why two cells are one trial."""

import pytest

from kvlab.sweep.planning.explain import explain_equality
from tests.support.stub_trials import tiny_plan

TWO_WAYS = """\
question: What does it cost?
experiment: e.yaml
factors:
  way:
    plain: {}
    other: {OTHER}
"""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("model.n_kv_head: 2", "the same values"),
        ("model.window: 8, model.attention_pattern: GL",
         "model.window, model.attention_pattern: a window of the block size or more is global"),
        ('model.kv_sharing: "adjacent:1"', "model.kv_sharing: the same layers own their K/V"),
        ('serving.tie: "adjacent:1"', "serving.tie: the same cache slots"),
        ("model.rope_theta: 500.0", "model.rope_theta: nothing is rotated"),
        ("evaluation.served_tokens: 65536", "evaluation.served_tokens: as many tokens"),
        ("training.checkpoint_every: 7", "where and how often"),
    ],
)  # fmt: skip
def test_equal_cells_are_one_trial(tmp_path, other, why):
    planned = tiny_plan(tmp_path, text=TWO_WAYS.replace("OTHER", other))
    assert len(planned.trials) == 1
    assert [dict(cell) for cell in planned.trials[0].cells] == [{"way": "plain"}, {"way": "other"}]
    one, other = (cell.experiment for cell in planned.sweep.cells())
    assert why in explain_equality(one, other)
