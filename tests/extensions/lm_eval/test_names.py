"""Metrics of tasks, which have names by a rule."""

import pytest

from kvlab.errors import UsageError
from kvlab.store.metrics import METRICS


def test_tasks_of_lm_eval_are_metrics_by_their_names():
    for name, facts in {
        "lm_eval_arc_easy_acc": ("lm-eval arc_easy acc", "", "higher"),
        "lm_eval_arc_easy_acc_norm_served": ("lm-eval arc_easy acc_norm, served", "", "higher"),
        "lm_eval_t_rouge_max_served": ("lm-eval t_rouge_max, served", "score", "neither"),
    }.items():
        assert name in METRICS
        assert (METRICS[name].title, METRICS[name].unit, METRICS[name].better) == facts
    for name in ("lm_eval_", "lm_eval", "acc", "lm_eval_Piqa_acc"):
        assert name not in METRICS
        with pytest.raises(UsageError):
            METRICS[name]


def test_metrics_are_sorted_as_the_table_and_then_by_task():
    names = ["lm_eval_b_acc_served", "lm_eval_a_acc", "unknown", "lm_eval_b_acc", "loss_served",
             "lm_eval_b_acc_norm", "loss"]  # fmt: skip
    assert METRICS.sort(names) == (
        "loss", "loss_served", "lm_eval_a_acc", "lm_eval_b_acc", "lm_eval_b_acc_served",
        "lm_eval_b_acc_norm",
    )  # fmt: skip
