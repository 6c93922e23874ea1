"""The designs: the contract, which cells each one gives, and fractions against their definition."""

from itertools import combinations

import numpy as np
import pytest

from kvlab.spec.designs import DESIGNS
from tests.contracts.design_contract import DesignContract
from tests.support.design_requests import list_positions, make_request


def cells(name, *sizes, **options):
    positions = list_positions(name, make_request(*sizes, **options))
    return ["".join(map(str, cell)) for cell in positions]


@pytest.fixture(scope="module", params=list(DESIGNS))
def name(request):
    return request.param


class TestDesigns(DesignContract):
    further_keys = {"cells": "cells: [{heads: mqa}]\n"}  # noqa: RUF012


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


FRACTIONAL = DESIGNS["fractional"]


def signs(cells):
    """Cells as columns of -1 (baseline) and 1."""
    return 2 * np.array(list(cells)) - 1


def column(table, effect):
    return np.prod(table[:, list(effect)], axis=1)


@pytest.mark.parametrize(
    ("count", "fraction", "resolution"),
    # Box, Hunter and Hunter, Statistics for Experimenters, table 6.22: the best resolutions.
    [(3, 2, 3), (4, 2, 4), (5, 2, 5), (5, 4, 3), (6, 4, 4), (6, 8, 3), (7, 8, 4), (8, 16, 4)],
)
def test_chosen_fractions_have_the_best_resolution(count, fraction, resolution):
    request = make_request(*[2] * count, fraction=fraction)
    table = signs(list_positions("fractional", request))
    assert len({tuple(row) for row in table}) == len(table) == 2**count // fraction
    shortest = min(
        size
        for size in range(1, count + 1)
        for effect in combinations(range(count), size)
        if abs(column(table, effect).sum()) == len(table)
    )
    assert shortest == resolution
    roman = {3: "III", 4: "IV", 5: "V", 6: "VI"}[resolution]
    [note] = FRACTIONAL.notes(request)
    title, _, relation = note.partition("; defining relation: I = ")
    words = relation.partition(",")[0].split(" = ")
    assert (title, len(set(words))) == (f"resolution {roman}", fraction - 1)
    for sign, *word in words:
        factors = map("abcdefgh".index, "".join(word).split("*"))
        assert (column(table, factors) == {"+": 1, "-": -1}[sign]).all(), note
