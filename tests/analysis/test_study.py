"""Which code most trials ran, and records of extensions that are not installed."""

from dataclasses import replace

import pytest

from kvlab import own_extensions
from kvlab.analysis.study import Study
from kvlab.errors import UsageError
from tests.support.cells import make_cells, make_study
from tests.support.record_factory import Record


def test_a_trial_of_several_cells_counts_once_in_the_usual_code():
    digests = {"a": "old", "b": "old", "c": "new", "d": "new"}

    def record(cell):
        return {"provenance": {"code": {"training": [digests[cell[0]]], "measurement": "m"}}}

    cells = make_cells({(level,): [1.0] for level in "abcd"}, record=record)
    shared = cells["a",][0]
    for level in "efg":
        cells[level,] = {0: replace(shared, levels=(level,))}
    cells["h",] = {0: replace(cells["c",][0], levels=("h",), trial="h 0")}
    study = make_study(cells, {"point": list("abcdefgh")})
    assert [row.levels for row in study.other_code] == [("g",), ("b",)]


@pytest.mark.parametrize(
    ("experiment", "reason"),
    [
        ({}, "is no metric"),
        ({"data": {"source": "recall"}}, "needs kvlab/extensions/recall, which"),
    ],
)
def test_a_record_that_a_missing_extension_decides_is_refused(
    experiment, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr(own_extensions, "load_parts", dict)
    decided = Record(
        factors={"heads": ("mha", "mqa")},
        change=lambda result, *_: result["experiment"].update(experiment),
    )
    store = decided.write(tmp_path)
    store.write_sweep({**store.sweep("made"), "decide": {"metric": "nosuch"}})
    with pytest.raises(UsageError, match=f"made is decided by nosuch, which {reason}"):
        Study.load(store, "made")
