"""Cells that are written differently and compute the same become one trial, and the plan says why."""

import pytest

from kvlab.sweep.planning.explain import explain_equality
from tests.support.stub_trials import tiny_plan

SWEEP = """\
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
        ("model.window: 99, model.attention_pattern: L", "a window of the block size or more"),
        ('model.kv_sharing: "adjacent:1"', "model.kv_sharing: the same layers own their K/V"),
        ("model.kv_sharing: [[0], [1]]", "model.kv_sharing: the same layers own"),
        ('serving.tie: "adjacent:1"', "serving.tie: the same cache slots"),
        ("serving.tie_rule: owner", "serving.tie_rule: nothing is tied"),
        ("model.rope_theta: 500.0", "model.rope_theta: nothing is rotated"),
        ("evaluation.served_tokens: 65536", "evaluation.served_tokens: as many tokens"),
        ("training.checkpoint_every: 7", "where and how often"),
    ],
)  # fmt: skip
def test_equal_cells_are_one_trial(tmp_path, other, why):
    planned = tiny_plan(tmp_path, text=SWEEP.replace("OTHER", other))
    assert len(planned.trials) == 1
    assert [dict(cell) for cell in planned.trials[0].cells] == [{"way": "plain"}, {"way": "other"}]
    one, other = (cell.experiment for cell in planned.sweep.cells())
    assert why in explain_equality(one, other)


@pytest.mark.parametrize(
    "other",
    [
        "model.n_kv_head: 1",
        "model.window: 7, model.attention_pattern: GL",
        'model.kv_sharing: "adjacent:2"',
        'serving.tie: "adjacent:2"',
        "serving.kv_dtype: int8",
        "model.rope_theta: 500.0, model.position: rope",
        "training.learning_rate: 1e-3",
    ],
)
def test_what_computes_something_else_stays_apart(tmp_path, other):
    assert len(tiny_plan(tmp_path, text=SWEEP.replace("OTHER", other)).trials) == 2
