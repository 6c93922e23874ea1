"""The designs: the contract, and which cells each one gives."""

import pytest

from kvlab.spec.designs import DESIGNS, Design, DesignError
from kvlab.spec.key_reference import json_schema
from tests.contracts.design_contract import FACTORS, DesignContract
from tests.support.design_requests import make_request
from tests.support.spec_files import load_sweep_text, sweep_errors


def cells(name, *sizes, **options):
    positions = DESIGNS[name].positions(make_request(*sizes, **options))
    return ["".join(map(str, cell)) for cell in positions]


class TestFull(DesignContract):
    name = "full"


class TestOneFactor(DesignContract):
    name = "one_factor"


class TestBaseline(DesignContract):
    name = "baseline"


class NeedsTarget:
    def test_a_factor_of_three_levels_needs_a_target(self):
        with pytest.raises(DesignError, match="the level of b that is the reduction: b1 or b2"):
            cells(self.name, 2, 3)
        assert cells(self.name, 2, 3, target=(1, 2))[-1] in ("12", "10")


class TestLeaveOneOut(DesignContract, NeedsTarget):
    name = "leave_one_out"


class TestCumulative(DesignContract, NeedsTarget):
    name = "cumulative"


class TestPairwise(DesignContract):
    name = "pairwise"


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("full", (2, 3), "00 01 02 10 11 12"),
        ("one_factor", (2, 3, 2), "000 100 010 020 001"),
        ("baseline", (2, 3, 2), "000"),
        ("leave_one_out", (2, 2, 2), "000 111 011 101 110"),
        ("cumulative", (2, 2, 2), "000 100 110 111"),
        ("pairwise", (2, 3, 2), "000 100 010 020 001 110 120 101 011 021"),
    ],
)
def test_each_design_selects_its_cells_once(name, sizes, expected):
    assert cells(name, *sizes) == expected.split()


class TestCells(DesignContract):
    name = "cells"
    further_keys = "cells: [{heads: mqa}]\n"

    def test_cells_have_to_be_listed(self):
        with pytest.raises(DesignError, match="needs `cells:`"):
            cells("cells", 2, 2)


class TestFractional(DesignContract):
    """Its mathematics is tested in `test_fractional_design`."""

    name = "fractional"


def test_every_design_of_the_table_has_a_contract_test():
    assert {test.name for test in DesignContract.__subclasses__()} == set(DESIGNS)


def test_a_new_design_is_a_function_and_a_table_line(monkeypatch, tmp_path):
    def corners(request):
        yield request.change_baseline({})
        yield tuple(len(axis.points) - 1 for axis in request.axes)

    text = f"{FACTORS}design: corners:7\n"
    with monkeypatch.context() as patched:
        patched.setitem(DESIGNS, "corners", Design("corners", corners, arguments=(7, 9)))
        labels = [
            " ".join(cell.levels.values()) for cell in load_sweep_text(tmp_path, text).cells()
        ]
        assert labels == ["mha global learned", "mqa hybrid rope"]
        assert "corners:7, corners:9" in sweep_errors(tmp_path, text.replace("corners:7", "half"))
        assert "corners:9" in json_schema("sweep")["properties"]["design"]["enum"]
    message = sweep_errors(tmp_path, text)
    assert "design = corners:7 is not one of full, one_factor" in message
    assert message.endswith("fractional:32, fractional:64")
