"""The designs: the contract, which cells each one gives, and fractions against their definition."""

from itertools import combinations

import numpy as np
import pytest

from kvlab.spec.designs import DESIGNS
from tests.contracts.design_contract import DesignContract
from tests.support.design_requests import make_request


def cells(name, *sizes, **options):
    positions = DESIGNS[name].positions(make_request(*sizes, **options))
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
    table = signs(FRACTIONAL.positions(request))
    assert len({tuple(row) for row in table}) == len(table) == 2**count // fraction
    shortest = min(
        size
        for size in range(1, count + 1)
        for effect in combinations(range(count), size)
        if abs(column(table, effect).sum()) == len(table)
    )
    assert shortest == resolution
    roman = {3: "III", 4: "IV", 5: "V", 6: "VI"}[resolution]
    assert FRACTIONAL.notes(request)[0].startswith(f"resolution {roman}; defining relation: I = ")


def test_the_notes_state_all_aliases_and_no_others():
    """Every note names two columns that are equal or opposite, and no such pair is left out."""
    request = make_request(2, 2, 2, 2, 2, fraction=4)
    table = signs(FRACTIONAL.positions(request))
    stated = set()
    for note in FRACTIONAL.notes(request)[1:]:
        effect, _, others = note.partition(" is aliased with ")
        for other in others.split(", "):
            sides = [list(map("abcde".index, text.split("*"))) for text in (effect, other[1:])]
            sign = {"+": 1, "-": -1}[other[0]]
            assert (column(table, sides[0]) == sign * column(table, sides[1])).all(), note
            stated.add(frozenset(map(tuple, sides)))
    effects = [e for size in (1, 2, 3) for e in combinations(range(5), size)]
    for one, other in combinations(effects, 2):
        if len(one) == 3:
            continue
        aliased = abs(column(table, one) @ column(table, other)) == len(table)
        assert aliased == (frozenset((one, other)) in stated), (one, other)
