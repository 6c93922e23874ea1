"""Which code most trials ran."""

from dataclasses import replace

from tests.support.cells import make_cells, make_study


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
    assert study.usual_code == ("new", "m")
    assert [row.levels for row in study.other_code] == [("g",), ("b",)]
