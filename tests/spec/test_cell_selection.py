"""Sweeps to cells: designs, conditions, exclusions, inclusions, seeds."""

import pytest

from kvlab.spec import cell_selection
from tests.support.spec_files import load_sweep_text, sweep_errors

FACTORS = """\
question: What does it cost?
experiment: e.yaml
factors:
  heads:
    mha: {}
    gqa: {model.n_kv_head: 2}
    mqa: {model.n_kv_head: 1}
  horizon:
    global: {}
    hybrid: {model.attention_pattern: GL}
  window:
    w8: {model.window: 8}
    w4: {model.window: 4}
"""
WHEN = "when: {window: {horizon: hybrid}}\n"


def names(sweep):
    return [" ".join(cell.levels.values()) for cell in sweep.cells()]


def test_a_factor_that_does_not_apply_changes_nothing_and_its_cells_become_one(tmp_path):
    sweep = load_sweep_text(tmp_path, FACTORS + WHEN)
    assert names(sweep) == [
        "mha global w8", "mha hybrid w8", "mha hybrid w4",
        "gqa global w8", "gqa hybrid w8", "gqa hybrid w4",
        "mqa global w8", "mqa hybrid w8", "mqa hybrid w4",
    ]  # fmt: skip
    first = sweep.cells()[0]
    assert first.off == {"window"}
    assert first.experiment.model.window is None
    assert [str(rule) for rule in sweep.selection.rules] == [
        "when window merged 3 of 12: window only where horizon=hybrid"
    ]


def test_rules_say_what_they_removed_and_added(tmp_path):
    rules = """\
exclude:
  - {heads: [gqa, mqa], horizon: hybrid}
  - {heads: mqa}
  - {horizon: hybrid, heads: gqa}
include:
  - {heads: mqa}
  - {heads: gqa}
"""
    sweep = load_sweep_text(tmp_path, FACTORS + WHEN + rules)
    assert [str(rule) for rule in sweep.selection.rules[1:]] == [
        "exclude 1 removed 4 of 12: heads=gqa|mqa, horizon=hybrid",
        "exclude 2 removed 1 of 12 (an earlier rule removed the other 2): heads=mqa",
        "exclude 3 removed 0 of 12 (an earlier rule removed the other 2): horizon=hybrid, heads=gqa",
        "include 1 added 1: heads=mqa",
        "include 2 added 0 (the design has the other 1): heads=gqa",
    ]
    assert names(sweep) == [
        "mha global w8", "mha hybrid w8", "mha hybrid w4", "gqa global w8", "mqa global w8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tail", "cells"),
    [
        ("design: cells\ncells: [{heads: mqa}, {horizon: hybrid, window: w4}]\n",
         ["mha global w8", "mqa global w8", "mha hybrid w4"]),
        ("design: cumulative\ntarget: {heads: mqa, window: w4}\n",
         ["mha global w8", "mqa global w8", "mqa hybrid w8", "mqa hybrid w4"]),
    ],
)  # fmt: skip
def test_listed_and_targeted_levels(tmp_path, tail, cells):
    factors = FACTORS.replace("    gqa: {model.n_kv_head: 2}\n", "")
    assert names(load_sweep_text(tmp_path, factors + WHEN + tail)) == cells


def test_several_designs_each_with_its_seeds(tmp_path):
    text = FACTORS + WHEN + "designs: {full: [0], one_factor: [0, 1, 2]}\n"
    seeds = {" ".join(c.levels.values()): c.seeds for c in load_sweep_text(tmp_path, text).cells()}
    assert len(seeds) == 9
    assert seeds["mha global w8"] == seeds["mqa global w8"] == (0, 1, 2)
    assert seeds["mqa hybrid w8"] == (0,)


def test_a_design_that_is_too_large_is_refused_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(cell_selection, "MAX_CELLS", 1000)
    factors = "".join(f"  f{n}: {{a: {{}}, b: {{training.tokens: 0}}}}\n" for n in range(60))
    text = f"question: q\nexperiment: e.yaml\nfactors:\n{factors}"
    assert "design has more than 1,000 cells" in sweep_errors(tmp_path, text)
