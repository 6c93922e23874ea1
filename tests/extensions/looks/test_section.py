"""Seeds that are added after a report, without looks."""

from kvlab.analysis.study import Study
from kvlab.report.report_files import write_report
from kvlab.store import Store
from tests.support.stub_looks import LOOKS, drive_looks, load_looks


def test_seeds_that_are_added_after_a_report_are_recognized(tmp_path):
    store, reports = Store(tmp_path / "runs"), tmp_path / "reports"
    for seeds in (2, 3, 5):
        sweep = load_looks(tmp_path, LOOKS.replace("{looks: [3, 5, 7]}", str(seeds)))
        drive_looks(sweep, store)
        assert "looks" not in Study.load(store, "s").sweep
        write_report(store, "s", reports, ["looks"])
    text = (reports / "s" / "report.md").read_text()
    assert "at 2, 3 seeds, and then seeds were added: now there are 5" in text
    assert "`seeds: {looks: [2, 3, 5]}`" in text
    write_report(store, "s", reports, ["looks"])
    assert (reports / "s" / "report.md").read_text() == text
