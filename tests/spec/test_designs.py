"""The designs: the contract, and which cells each one gives."""

import pytest

from kvlab.spec.designs import DESIGNS, DesignError
from tests.contracts.design_contract import DesignContract
from tests.support.design_requests import make_request


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
