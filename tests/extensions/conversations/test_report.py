"""The section of reuse, word for word, and its metrics in MLflow."""

from pathlib import Path

from kvlab.store.metrics import collect_metrics
from kvlab.track.run_description import tracked_metrics
from tests.extensions.conversations.records import RECORD
from tests.report.reading import load, markdown
from tests.support.golden import check_golden


def test_the_section_is_the_golden_one(tmp_path):
    text = markdown(load(RECORD, tmp_path, "reuse"))
    check_golden(Path(__file__).with_name("report.txt"), text)


def test_turns_are_a_curve_of_a_group_of_their_own():
    result = RECORD.result({"heads": "mqa", "sharing": "none"}, 0, "done")
    result["measurements"] = {f"reuse_hit_rate_turn{turn}": turn / 16 for turn in (1, 2, 10)}
    result["measurements"]["reuse_hit_rate"] = 0.5
    points = [point for point in tracked_metrics(result) if point[0].startswith("reuse/")]
    curve = [("reuse/hit_rate_by_turn", turn / 16, turn) for turn in (1, 2, 10)]
    assert points == [("reuse/hit_rate", 0.5, None), *curve]


def test_a_gap_of_rounding_is_zero():
    assert collect_metrics({"measurements": {"reuse_gap": -9e-6}})["reuse_gap"] == 0.0
