"""What every design must do. A member's tests inherit `DesignContract`."""

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


class DesignContract:
    """Give a fixture ``name``, its name in the table, and the keys that it needs beside `design`."""

    further_keys: dict[str, str] = {}  # noqa: RUF012

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
