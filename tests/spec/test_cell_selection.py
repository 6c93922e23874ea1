"""Sweeps to cells: designs, conditions, exclusions, inclusions, zipped factors, seeds."""

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


def test_zipped_factors_move_together(tmp_path):
    text = (
        FACTORS.replace("    gqa: {model.n_kv_head: 2}\n", "") + WHEN + "zip: [[heads, horizon]]\n"
    )
    assert names(load_sweep_text(tmp_path, text)) == [
        "mha global w8",
        "mqa hybrid w8",
        "mqa hybrid w4",
    ]


def test_several_designs_each_with_its_seeds(tmp_path):
    text = FACTORS + WHEN + "designs: {full: [0], one_factor: [0, 1, 2]}\n"
    seeds = {" ".join(c.levels.values()): c.seeds for c in load_sweep_text(tmp_path, text).cells()}
    assert len(seeds) == 9
    assert seeds["mha global w8"] == seeds["mqa global w8"] == (0, 1, 2)
    assert seeds["mqa hybrid w8"] == (0,)


def test_factors_that_a_listed_cell_omits_are_at_their_baseline(tmp_path):
    text = (
        FACTORS
        + WHEN
        + "design: cells\ncells:\n  - {heads: mqa}\n  - {horizon: hybrid, window: w4}\n"
    )
    assert names(load_sweep_text(tmp_path, text)) == [
        "mha global w8",
        "mqa global w8",
        "mha hybrid w4",
    ]


def test_cumulative_takes_the_target(tmp_path):
    text = FACTORS + WHEN + "design: cumulative\ntarget: {heads: gqa, window: w4}\n"
    assert names(load_sweep_text(tmp_path, text)) == [
        "mha global w8",
        "gqa global w8",
        "gqa hybrid w8",
        "gqa hybrid w4",
    ]


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("design: half\n", "s.yaml:14:9: design = half is not one of full, one_factor"),
        ("design: fractional:3\n", "design = fractional:3 is not one of"),
        ("design: fractional:2\n", "design = fractional:2 takes factors of two levels, and heads has 3"),
        ("design: cumulative\n", "s.yaml:1:1: target must name the level of heads that is the reduction: gqa or mqa"),
        ("target: {heads: gqa}\n", "target = {...} is used by design: cumulative or leave_one_out alone"),
        ("cells: [{heads: gqa}]\n", "is used by design: cells alone; leave it out"),
        ("generators: {heads: [horizon, window]}\n", "is used by design: fractional alone"),
        ("designs: {full: [0]}\nseeds: [1]\n", "leave out design and seeds"),
        ("designs: {full: [0, 0]}\n", "designs.full = [0, 0] names a seed twice"),
        ("when: {horizon: {window: w8}}\n", "is not above horizon in factors; move it there"),
        ("when: {heads: {heads: mha}}\n", "is not above heads"),
        ("when: {windo: {horizon: hybrid}}\n", "when.windo = {...} is not a factor; did you mean window?"),
        ("when: {window: {}}\n", "names no level"),
        ("exclude: [{windo: []}]\n", "exclude.0.windo = [] names no level"),
        ("include: [{heads: []}]\n", "include.0.heads = [] names no level"),
        ("exclude: [{}]\n", "exclude.0 = {...} names no level, so it would fit every cell"),
        (WHEN + "include: [{window: w4}]\n", "sets window, which `when` switches off there"),
        ("zip: [[heads, horizon]]\n", "joins factors of unequal length (heads 3, horizon 2)"),
        ("zip: [[window, horizon]]\n", "must begin with horizon, which comes first"),
        ("zip: [[horizon, windo]]\n", "names windo, which is not a factor; did you mean window?"),
        ("zip: [[horizon, window], [window, horizon]]\n", "zipped already"),
        ("zip: [[horizon, window]]\nbaseline: {window: w4}\n", "no row with the baseline levels of all"),
        ("zip: [[horizon, window]]\ninclude: [{horizon: hybrid, window: w8}]\n", "are never together in the zip"),
    ],
)  # fmt: skip
def test_refusals(tmp_path, tail, message):
    assert message in sweep_errors(tmp_path, FACTORS + tail)


def test_a_design_that_is_too_large_is_refused_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(cell_selection, "MAX_CELLS", 1000)
    factors = "".join(f"  f{n}: {{a: {{}}, b: {{training.tokens: 0}}}}\n" for n in range(60))
    text = f"question: q\nexperiment: e.yaml\nfactors:\n{factors}"
    assert "design has more than 1,000 cells" in sweep_errors(tmp_path, text)
