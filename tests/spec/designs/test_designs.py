"""What every design keeps to, and which cells each one has."""

from collections import Counter

import pytest

from kvlab.spec.design import DesignError
from kvlab.spec.designs import DESIGNS
from tests.spec.designs.asking import asked


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 2, 2, 2)])
def test_contract(name, sizes):
    """The baseline is there, every position exists, and asking again gives the same cells."""
    question = asked(*sizes, cells=((0, 1) + (0,) * (len(sizes) - 2),), fraction=2)
    cells = list(DESIGNS[name].positions(question))
    assert cells == list(DESIGNS[name].positions(question))
    assert (0,) * len(sizes) in cells
    assert all(len(cell) == len(sizes) for cell in cells)
    assert all(0 <= at < size for cell in cells for at, size in zip(cell, sizes, strict=True))
    assert all(isinstance(note, str) for note in DESIGNS[name].notes(question))


def cells(name, *sizes, **options):
    return ["".join(map(str, c)) for c in DESIGNS[name].positions(asked(*sizes, **options))]


def test_full_is_every_combination_once():
    found = cells("full", 2, 3)
    assert found == ["00", "01", "02", "10", "11", "12"]


def test_one_factor_is_each_level_alone():
    assert cells("one_factor", 2, 3, 2) == ["000", "100", "010", "020", "001"]


def test_leave_one_out_is_all_and_all_but_each():
    assert cells("leave_one_out", 2, 2, 2) == ["000", "111", "011", "101", "110"]


def test_cumulative_adds_one_after_the_other():
    assert cells("cumulative", 2, 2, 2) == ["000", "100", "110", "111"]


def test_pairwise_has_the_four_corners_of_every_two_levels():
    found = cells("pairwise", 2, 3, 2)
    assert Counter(found).most_common(1)[0][1] == 1
    assert set(found) == {
        "000", "100", "010", "020", "001", "110", "120", "101", "011", "021",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["leave_one_out", "cumulative"])
def test_a_factor_of_three_levels_needs_a_target(name):
    with pytest.raises(DesignError, match="which level of b is the reduction: b1 or b2"):
        cells(name, 2, 3)
    assert cells(name, 2, 3, target=(1, 2))[-1] in ("12", "10")


def test_written_cells_need_to_be_written():
    with pytest.raises(DesignError, match="needs `cells:`"):
        cells("cells", 2, 2)
