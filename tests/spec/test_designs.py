"""The designs: the contract, which cells each one gives, and fractions against their definition."""

from itertools import combinations

import numpy as np
import pytest

from kvlab.spec.designs import DESIGNS
from tests.support.design_requests import list_positions, make_request
from tests.support.spec_files import load_sweep_text

FACTORS = """\
question: What does it cost?
experiment: e.yaml
factors:
  heads: {mha: {}, mqa: {model.n_kv_head: 1}}
  horizon: {global: {}, hybrid: {model.attention_pattern: GL, model.window: 8}}
  position: {learned: {}, rope: {model.position: rope}}
"""


class TestDesigns:
    further_keys = {"cells": "cells: [{heads: mqa}]\n"}  # noqa: RUF012

    @pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 2, 2, 2)])
    def test_it_gives_the_baseline_and_existing_positions_the_same_each_time(self, name, sizes):
        request = make_request(*sizes, listed=[{"b": "b1"}], fraction=2)
        cells = list_positions(name, request)
        assert cells == list_positions(name, request)
        assert (0,) * len(sizes) in cells
        assert all(cell.keys() <= request.factors.keys() for cell in DESIGNS[name].cells(request))
        notes = DESIGNS[name].notes(make_request(2, 2, 2, fraction=2))
        assert all(isinstance(note, str) and "\n" not in note for note in notes)

    def test_a_sweep_names_it_alone_or_among_several(self, name, tmp_path):
        arguments, keys = DESIGNS[name].arguments, self.further_keys.get(name, "")
        written = f"{name}:{arguments[0]}" if arguments else name
        alone = load_sweep_text(tmp_path, f"{FACTORS}design: {written}\n{keys}")
        several = load_sweep_text(tmp_path, f"{FACTORS}designs: {{'{written}': [3]}}\n{keys}")
        assert [cell.levels for cell in alone.cells()] == [c.levels for c in several.cells()]
        assert alone.cells()[0].levels == alone.baseline
        assert {cell.seeds for cell in several.cells()} == {(3,)}


def cells(name, *sizes, **options):
    positions = list_positions(name, make_request(*sizes, **options))
    return ["".join(map(str, cell)) for cell in positions]


@pytest.fixture(scope="module", params=list(DESIGNS))
def name(request):
    return request.param


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
