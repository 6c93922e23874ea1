"""The designs: the contract, and which cells each one gives."""

from collections import Counter

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

    def test_every_combination_once(self):
        assert cells("full", 2, 3) == ["00", "01", "02", "10", "11", "12"]


class TestOneFactor(DesignContract):
    name = "one_factor"

    def test_each_level_alone(self):
        assert cells("one_factor", 2, 3, 2) == ["000", "100", "010", "020", "001"]


class TestBaseline(DesignContract):
    name = "baseline"

    def test_one_cell(self):
        assert cells("baseline", 2, 3, 2) == ["000"]


class NeedsTarget:
    def test_a_factor_of_three_levels_needs_a_target(self):
        with pytest.raises(DesignError, match="the level of b that is the reduction: b1 or b2"):
            cells(self.name, 2, 3)
        assert cells(self.name, 2, 3, target=(1, 2))[-1] in ("12", "10")


class TestLeaveOneOut(DesignContract, NeedsTarget):
    name = "leave_one_out"

    def test_all_reductions_and_all_but_each(self):
        assert cells("leave_one_out", 2, 2, 2) == ["000", "111", "011", "101", "110"]


class TestCumulative(DesignContract, NeedsTarget):
    name = "cumulative"

    def test_one_reduction_after_the_other(self):
        assert cells("cumulative", 2, 2, 2) == ["000", "100", "110", "111"]


class TestPairwise(DesignContract):
    name = "pairwise"

    def test_the_four_corners_of_every_two_levels(self):
        pairs = cells("pairwise", 2, 3, 2)
        assert Counter(pairs).most_common(1)[0][1] == 1
        assert set(pairs) == {
            "000", "100", "010", "020", "001", "110", "120", "101", "011", "021",
        }  # fmt: skip


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
        yield request.baseline
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
