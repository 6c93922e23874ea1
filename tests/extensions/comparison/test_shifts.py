"""Comparisons of two sweeps: equal truths are called changed rarely, planted changes are found."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvlab.cli.main import main
from kvlab.extensions.comparison.sweeps import compare_sweeps, estimate_shifts
from tests.support.cells import make_cells, make_study
from tests.support.record_factory import Record

FACTS = {"experiment": {"data": {"tokenizer": "gpt2"}}}
FACTORS = {
    "heads": ("mha", "mqa"),
    "position": ("learned", "rope"),
    "sharing": ("none", "trained", "tied"),
}


def draw_cells(seeds, random, shift=0.0):
    """Cells by seed; one K/V head costs ``shift``, and ties share their trained weights."""
    common, noise, losses = random.normal(0, 0.1, seeds), {}, {}
    for cell in itertools.product(*FACTORS.values()):
        own = noise.setdefault(weights_of(cell), random.normal(0, 0.01, seeds))
        losses[cell] = 4 + common + own + shift * (cell[0] == "mqa")
    return make_cells(losses, training=weights_of, record=lambda _: FACTS)


def weights_of(cell):
    return (*cell[:2], cell[2].replace("tied", "none"))


def renumbered(cells, first):
    """The same trials at other seeds."""
    return {
        levels: {seed + first: replace(row, seed=seed + first) for seed, row in by_seed.items()}
        for levels, by_seed in cells.items()
    }


def shifts(before, after):
    one, other = make_study(before, FACTORS), make_study(after, FACTORS)
    return estimate_shifts(one, other, {levels: levels for levels in one.cells}, "loss")


@pytest.mark.parametrize("first", [0, 100])
def test_a_level_that_changed_is_found(first):
    random = np.random.default_rng(4)
    before = draw_cells(5, random)
    after = renumbered(draw_cells(5, random, 0.3), first)
    cells, effects, is_paired = shifts(before, after)
    assert is_paired == (first == 0)
    assert effects["heads=mqa"].is_found
    assert effects["heads=mqa"].value == pytest.approx(0.3, abs=0.03)
    assert not effects["position=rope"].is_found
    assert not effects["heads=mqa and position=rope"].is_found
    if is_paired:
        assert {levels[0] for levels, one in cells.items() if one.is_found} == {"mqa"}


@pytest.mark.parametrize(("seeds", "first"), [((1, 1), 5), ((1, 3), 5), ((3, 1), 0)])
def test_a_single_seed_tests_nothing_whether_it_is_shared_or_not(seeds, first):
    random = np.random.default_rng(8)
    before, after = (draw_cells(count, random) for count in seeds)
    of_cells, effects, is_paired = shifts(before, renumbered(after, first))
    assert (len(of_cells), is_paired) == (len(before), first == 0)
    assert {of_cells[cell].kind for cell in before if "tied" not in cell} == {"one seed"}
    assert effects["heads=mqa"].kind == "one seed"


def test_sweeps_without_a_cell_in_common_compare_nothing():
    cells = draw_cells(3, np.random.default_rng(9))
    studies = [
        make_study({levels: cells[levels] for levels in cells if levels[0] == heads}, FACTORS)
        for heads in FACTORS["heads"]
    ]
    assert estimate_shifts(*studies, {}, "loss") == ({}, {}, True)


@pytest.mark.parametrize("first", [0, 100])
def test_the_order_of_factors_does_not_matter(first):
    cells = draw_cells(3, np.random.default_rng(10))
    turned = {
        levels[::-1]: {seed: replace(row, levels=levels[::-1]) for seed, row in by_seed.items()}
        for levels, by_seed in renumbered(cells, first).items()
    }
    before = make_study(cells, FACTORS)
    after = make_study(turned, dict(reversed(FACTORS.items())))
    shared = {levels: levels[::-1] for levels in cells}
    found = estimate_shifts(before, after, shared, "loss")[1]
    assert "heads=mqa and position=rope" in found
    assert (
        found.keys()
        == estimate_shifts(after, before, dict(zip(turned, cells, strict=True)), "loss")[1].keys()
    )


def test_the_same_trials_are_identical():
    cells = draw_cells(3, np.random.default_rng(5))
    of_cells, effects, _ = shifts(cells, cells)
    assert {one.kind for one in (*of_cells.values(), *effects.values())} == {"identical"}


def test_cells_are_joined_by_their_levels_whatever_the_baseline_is():
    losses = {("mha",): [4.0, 4.1, 4.2], ("mqa",): [5.0, 5.1, 5.2]}
    cells = make_cells(losses, record=lambda _: {**FACTS, "provenance": {}})
    studies = [make_study(cells, {"heads": names}) for names in (("mha", "mqa"), ("mqa", "mha"))]
    found = compare_sweeps(*studies)
    assert [one.verdict for one in found.cells] == ["identical", "identical"]
    assert found.warnings == ("the baseline has heads=mha against heads=mqa",)


def test_a_level_is_not_compared_with_itself_against_another_baseline():
    random = np.random.default_rng(7)
    names = ("mha", "gqa", "mqa")
    losses = {(name,): 4.0 + n + random.normal(0, 0.01, 4) for n, name in enumerate(names)}
    cells = make_cells(losses, record=lambda _: {**FACTS, "provenance": {}})
    before = make_study(cells, {"heads": names})
    after = make_study(renumbered(cells, 50), {"heads": ("gqa", "mha", "mqa")})
    found = {one.about: one.verdict for one in compare_sweeps(before, after).conclusions}
    assert found == {
        "heads=gqa from heads=mha": "not compared",
        "heads=mqa from heads=mha": "not compared",
        "heads=mha from heads=gqa": "not compared",
        "heads=mqa from heads=gqa": "not compared",
    }


def test_shares_that_seeds_agree_on_by_chance_are_not_called_different():
    cells = [
        make_cells({("mha",): [share] * 2}, "hellaswag_acc", record=lambda _: FACTS)
        for share in (0.5, 0.51)
    ]
    studies = [make_study(one, {"heads": ("mha",)}) for one in (cells[0], renumbered(cells[1], 9))]
    found, _, is_paired = estimate_shifts(*studies, {("mha",): ("mha",)}, "hellaswag_acc")
    assert not is_paired
    assert (found["mha",].kind, found["mha",].is_found) == ("unvaried", False)


def test_the_confidence_is_that_of_the_sweep(tmp_path, capsys):
    for name in ("a", "b"):
        store = Record(factors={"heads": ("mha", "mqa")}).write(tmp_path / name)
        store.write_sweep({**store.sweep("made"), "decide": {"alpha": 0.01}})
    stores = ["--store", str(tmp_path / "a"), "--store-b", str(tmp_path / "b")]
    assert main(["compare", "made", "made", *stores]) == 0
    printed = capsys.readouterr().out
    assert printed.count("simultaneous 99% CI") == 2
    assert "is not zero, at 1% for everything that is compared" in printed


def test_independent_seeds_are_welch():
    random = np.random.default_rng(6)
    before, after = draw_cells(3, random), renumbered(draw_cells(6, random), 50)
    for levels, shift in shifts(before, after)[0].items():
        one, other = (
            [row.measurements["loss"] for row in cells[levels].values()]
            for cells in (before, after)
        )
        theirs = stats.ttest_ind(other, one, equal_var=False)
        assert shift.value / shift.error.value == pytest.approx(theirs.statistic, rel=1e-9)
        assert shift.error.df == pytest.approx(theirs.df, rel=1e-9)
