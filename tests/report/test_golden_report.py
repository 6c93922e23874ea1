"""Reports of a made-up design and of a made-up search, word for word.

`KVLAB_REWRITE_GOLDEN=1 python -m pytest tests/report/test_golden_report.py` writes the files in
`golden/` anew; read their diff before you commit it.
"""

import os
from pathlib import Path

import pytest

from kvlab.analysis.study import Study
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document, results_csv
from kvlab.report.table_export import table_to_latex
from tests.report.full_record import FullRecord
from tests.support.search_record import EVERY_OUTCOME

GOLDEN = Path(__file__).parent / "golden"


def state(sizes, value, error, bound, outcome):
    """A claim after a look: 5% over both looks and four claims."""
    reach = bound * error
    return {
        "sizes": sizes, "value": value, "error": error, "level": 0.0125, "bound": bound,
        "low": value - reach, "high": value + reach, "outcome": outcome, "is_open": not outcome,
    }  # fmt: skip


class GoldenRecord(FullRecord):
    """Ties, two looks, a failed and a pruned trial, a level that is worse and one undecided."""

    def __init__(self):
        super().__init__(effects={"mqa": 0.10, "trained": 0.03}, noise=0.02)

    def loss(self, levels, seed):
        return round(super().loss(levels, seed), 6)  # the last digits are the processor's

    def measurements(self, levels, seed):
        return super().measurements(levels, seed) | {"loss_bigram": 4.05}

    def description(self, cells):
        claims = ["heads=mqa", "sharing=trained", "sharing=tied"]
        decide = {"margin": 0.05, "claims": claims}
        first = {
            "heads=mqa": state([3], 0.11, 0.006, 57.0, ""),
            "sharing=trained": state([3], 0.04, 0.006, 57.0, ""),
            "sharing=tied": state([3], 1.52, 0.01, 57.0, "worse"),
        }
        second = first | {
            "heads=mqa": state([3, 5], 0.1, 0.005, 6.5, "worse"),
            "sharing=trained": state([3, 5], 0.03, 0.008, 6.5, ""),
        }
        taken = [
            {"number": number, "seeds": seeds, "metric": "loss_served", "states": states}
            for number, seeds, states in ((1, 3, first), (2, 5, second))
        ]
        declared = {"seeds": {"looks": [3, 5], "first": 0}, "decide": decide, "design": "made"}
        stages = {"declared": {"looks": declared}, "number": 3, "name": "done", "is_last": True}
        found = {**super().description(cells), "decide": decide}
        return found | {"stages": stages, "looks": {"taken": taken}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    study = Study.load(GoldenRecord().write(tmp_path_factory.mktemp("golden")), "made")
    document = make_document(study)
    ablation = next(table for table in document.tables if table.name == "ablation")
    search = Study.load(EVERY_OUTCOME.write(tmp_path_factory.mktemp("search")), "made")
    return {
        "search.txt": render_markdown(make_document(search)),
        "report.txt": render_markdown(document),
        "results.csv": results_csv(study),
        "ablation.tex": table_to_latex(ablation),
    }


@pytest.mark.parametrize("name", ["report.txt", "results.csv", "ablation.tex", "search.txt"])
def test_the_report_is_the_golden_one(files, name):
    path = GOLDEN / name
    if os.environ.get("KVLAB_REWRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(files[name], encoding="utf-8")
    assert files[name] == path.read_text(encoding="utf-8"), (
        f"golden/{name} differs; if the change is meant, run with KVLAB_REWRITE_GOLDEN=1"
    )
