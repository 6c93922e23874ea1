"""Fronts and budgets, against a slow definition and on numbers that can be done by hand."""

import csv
import random
from statistics import mean

import pytest
from scipy import stats

from kvlab.analysis.study import Study
from kvlab.report import write_report
from kvlab.report.markdown import render_markdown
from kvlab.report.pareto_front import (
    COSTS,
    best_cells_by_budget,
    cost_front,
    memory_front,
)
from kvlab.report.report_files import make_document
from kvlab.report.table_columns import interval_scope
from tests.support.record_factory import Record, SizedRecord


def study(tmp_path, **changes):
    record = Record(**changes)
    return Study.load(record.write(tmp_path / "store"), record.name)


def beaten(one, others, sign):
    """Another is as good in both and better in one."""
    return any(
        other.cost <= one.cost
        and sign * other.mean <= sign * one.mean
        and (other.cost < one.cost or sign * other.mean < sign * one.mean)
        for other in others
    )


@pytest.mark.parametrize("metric", ["loss_served", "hellaswag_acc_norm", "tokens_per_second"])
@pytest.mark.parametrize("cost", list(COSTS))
def test_fronts_by_their_definition(tmp_path, metric, cost):
    found = cost_front(study(tmp_path, items=12, noise=0.2), metric, COSTS[cost])
    sign = 1 if metric == "loss_served" else -1
    assert len(found) == 24
    assert {p.levels for p in found if p.is_on_front} == {
        p.levels for p in found if not beaten(p, found, sign)
    }
    assert all(
        not set(p.rivals) - {q.levels for q in found if q.cost <= p.cost} - {p.levels}
        for p in found
    )
    assert [p.cost for p in found] == sorted(p.cost for p in found)


class Sized(Record):
    """Six cells of 3 MiB, 2 MiB, 1 MiB ... per 1,024 tokens, with losses by hand."""

    cost = {"a": 3072, "b": 2048, "c": 1024, "d": 1000, "e": 300, "f": 1}  # noqa: RUF012
    worth = {"a": 4.0, "b": 3.9, "c": 4.2, "d": 4.1, "e": 4.3, "f": 5.0}  # noqa: RUF012

    def bytes(self, levels):
        return self.cost[levels["size"]] * 1024 // 4  # at a block size of 256

    def loss(self, levels, seed):
        return self.worth[levels["size"]] + 0.01 * seed + random.Random(seed).gauss(0, 1e-6)


def sized(tmp_path, **changes):
    record = Sized(factors={"size": tuple("abcdef")}, **changes)
    return Study.load(record.write(tmp_path / "store"), record.name)


def test_the_best_cell_in_every_budget(tmp_path):
    found = [
        (best.condition, best.point.levels[0], best.n_fitting, best.choice.rivals)
        for best in best_cells_by_budget(sized(tmp_path))
    ]
    assert found[:3] == [
        ("within 2 MiB per 1,024 tokens", "b", 5, ()),
        ("within 1 MiB per 1,024 tokens", "d", 4, ()),
        ("within 512 KiB per 1,024 tokens", "e", 2, ()),
    ]
    assert found[3:] == [
        (f"within {size} KiB per 1,024 tokens", "f", 1, ())
        for size in (256, 128, 64, 32, 16, 8, 4, 2, 1)
    ]


def test_a_budget_as_large_as_the_baseline_is_none(tmp_path):
    class Even(Sized):
        cost = {**Sized.cost, "a": 2048}  # noqa: RUF012

    record = Even(factors={"size": tuple("ace")})
    found = Study.load(record.write(tmp_path / "store"), record.name)
    assert [best.budget for best in best_cells_by_budget(found)] == [2**20, 2**19]


def test_the_front_of_memory_is_of_differences_from_the_own_reference(tmp_path):
    """Rotary positions are 0.5 better and save nothing: no cell gets on the front by them."""
    factors = {"heads": ("mha", "mqa", "gqa"), "position": ("learned", "rope")}

    costs = {("mqa", "learned"): 0.2, ("mqa", "rope"): 0.1, ("gqa", "learned"): 0.15,
             ("gqa", "rope"): 0.3}  # fmt: skip

    class Free(Record):
        def bytes(self, levels):
            return {"mha": 4000, "gqa": 2000, "mqa": 1000}[levels["heads"]]

        def loss(self, levels, seed):
            gain = -0.5 if levels["position"] == "rope" else 0.0
            return 4.0 + 0.1 * seed + gain + costs.get(tuple(levels.values()), 0.0)

    record = Free(factors=factors)
    found = Study.load(record.write(tmp_path / "store"), "made")
    points = {p.levels: p for p in memory_front(found)}
    assert {c: round(p.quality, 9) for c, p in points.items()} == {
        ("mha", "learned"): 0.0, ("mha", "rope"): 0.0, **costs
    }  # fmt: skip
    # Both references cost nothing, and tie; gqa at 2,000 bytes is beaten by mqa+rope at 1,000.
    on_front = {c for c, p in points.items() if p.is_on_front}
    assert on_front == {("mqa", "rope"), ("mha", "learned"), ("mha", "rope")}
    assert points["mqa", "rope"].mean == pytest.approx(4.1 - 0.5 + 0.1)


def test_cells_of_several_sizes_are_placed_by_their_part_of_their_references_bytes(tmp_path):
    class Sizes(SizedRecord):
        def bytes(self, levels):
            whole = {"small": 1000, "middle": 3000, "large": 9000}[levels["size"]]
            return whole // (4 if levels["heads"] == "mqa" else 1)

    found = Study.load(Sizes().write(tmp_path / "store"), "made")
    costs = {point.levels: point.cost for point in memory_front(found)}
    assert len(costs) == 12
    assert set(costs.values()) == {0.25, 1.0}
    assert all(cost == (0.25 if "mqa" in levels else 1.0) for levels, cost in costs.items())


def test_a_cell_without_its_reference_is_on_no_front(tmp_path):
    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}
    lost = {"heads": "mha", "position": "rope"}
    record = Record(factors=factors, status=lambda c, _: "failed" if c == lost else "done")
    found = Study.load(record.write(tmp_path / "store"), "made")
    assert {p.levels for p in memory_front(found)} == {("mha", "learned"), ("mqa", "learned")}


def test_the_smallest_on_the_front_is_in_the_answer(tmp_path):
    found = sized(tmp_path)
    assert [p.levels[0] for p in memory_front(found) if p.is_on_front] == ["f", "e", "d", "b"]


def test_the_sections_say_it(tmp_path):
    record = Sized(factors={"size": tuple("abcdef")}, items=10)
    sections = ["answer", "pareto", "equal-memory"]
    folder = write_report(record.write(tmp_path / "store"), record.name, tmp_path, sections)
    with (folder / "tables" / "equal-memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["best cell"] for row in rows[:3]] == ["b", "d", "e"]
    assert float(rows[0]["budget per 1,024 tokens (bytes)"]) == 2**21
    figures = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert figures == {"pareto", "effects", "pareto-read"}, (
        "no front of accuracies at chance, or of times"
    )
    assert {p.stem for p in (folder / "figures").glob("*.png")} == figures
    with (folder / "tables" / "fronts.csv").open() as file:
        on = {row["cell"]: row["served loss by stored bytes"] for row in csv.DictReader(file)}
    assert {cell for cell, where in on.items() if where} == {"b", "d", "e", "f"}


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_what_diverged_stands_on_no_front_and_wins_no_budget(tmp_path, share):
    """Half of the cells lose trials at random: the luckiest seeds that are left make no winner."""

    def status(levels, seed):
        luck = random.Random(f"{sorted(levels.items())} {seed} {share}")
        is_fragile = "mqa" in levels.values()
        return "diverged" if is_fragile and luck.random() < share else "done"

    class Flattered(Record):
        def loss(self, levels, seed):
            gain = 1.0 if "mqa" in levels.values() else 0.0
            return super().loss(levels, seed) - gain

    record = Flattered(status=status)
    found = Study.load(record.write(tmp_path / "store"), record.name)
    diverged = {row.levels for row in found.rows if row.status == "diverged"}
    assert set(found.diverged_cells) == diverged
    assert 0 < len(diverged) < len(found.cells)
    for cost in COSTS.values():
        assert not diverged & {p.levels for p in cost_front(found, "loss_served", cost)}
    for best in best_cells_by_budget(found):
        assert not diverged & {best.point.levels, *best.choice.rivals}
        assert set(best.diverged) <= diverged
    text = render_markdown(make_document(found))
    answer = text.split("## The answer")[1].split("\n## ")[0]
    named = {f"**{found.label(levels)}**" for levels in diverged}
    assert not [name for name in named if name in answer]


def test_cells_on_the_front_by_chance_are_marked(tmp_path):
    class Even(Sized):
        worth = {**Sized.worth, "d": 4.0, "e": 4.0, "c": 4.0}  # noqa: RUF012

        def loss(self, levels, seed):
            own = random.Random(f"{levels} {seed}").gauss(0, 0.01)
            return self.worth[levels["size"]] + own

    record = Even(factors={"size": tuple("abcdef")}, seeds=(0, 1, 2, 3, 4))
    found = Study.load(record.write(tmp_path / "store"), record.name)
    front = {
        p.levels[0]: {levels[0] for levels in p.rivals}
        for p in memory_front(found)
        if p.is_on_front
    }
    assert front["f"] == front["e"] == front["b"] == set(), "better than every smaller cell"
    assert all(rivals and rivals <= set("cde") for cell, rivals in front.items() if cell in "acd")


def near_threshold(tmp_path, combined):
    """Each level alone beside the baseline, and with `combined` all levels together."""
    factors = {
        "heads": ("mha", "mqa"),
        "position": ("learned", "rope"),
        "sharing": ("none", "tied"),
    }

    def exclude(levels):
        changed = sum(levels[factor] != first for factor, (first, _) in factors.items())
        return changed > 1 and not (combined and changed == 3)

    return study(tmp_path, factors=factors, exclude=exclude, noise=0.03, seeds=(0, 1, 2, 3))


@pytest.mark.parametrize("combined", [False, True])
def test_a_cell_that_is_a_levels_effect_has_its_interval(tmp_path, combined):
    found = near_threshold(tmp_path, combined)
    assert len(found.cells) == 4 + combined
    for effect in found.effects("loss_served"):
        (cell,) = (levels for levels, weight in effect.weights.items() if weight > 0)
        if effect.name == "position=rope":  # it saves no byte
            assert cell in found.estimand.references
            continue
        one = found.comparisons[cell]
        assert (one.value, one.low, one.high) == (effect.value, effect.low, effect.high)
        assert (one.verdict, one.seeds) == (effect.verdict, effect.seeds)
    assert interval_scope(found) == ("both" if combined else "levels")


def test_cells_of_a_factorial_have_bonferroni_intervals_around_their_own_references(tmp_path):
    """Rotary positions save no byte, so what has them is compared with them alone."""
    record = Record(noise=0.02)
    found = Study.load(record.write(tmp_path / "store"), "made")
    learned, rope = ("mha", "learned", "global", "none"), ("mha", "rope", "global", "none")
    assert found.estimand.references == (learned, rope)
    compared = found.comparisons
    assert compared.keys() == found.cells.keys() - {learned, rope}
    assert len(compared) == 22
    for levels, one in compared.items():
        assert one.reference == (rope if levels[1] == "rope" else learned)
        assert one.effect is None, "a factorial's effects are over several settings"
        cells = [dict(zip(record.factors, c, strict=True)) for c in (levels, one.reference)]
        new, old = ([record.measurements(c, n)["loss_served"] for n in (0, 1, 2)] for c in cells)
        assert one.value == pytest.approx(mean(new) - mean(old))
        error = found.ranking("loss_served").difference(levels, one.reference)
        if levels[2:] == ("global", "tied") and levels[0] == "mha":  # its reference's weights
            assert (error.kind, one.has_interval) == ("exact", False)
            continue
        reach = stats.t.ppf(1 - 0.05 / 2 / 20, error.df) * error.standard_error
        ends = one.value - reach, one.value + reach
        if ends[0] < 0 == one.low < one.value:  # a later step of Holm's finds it
            ends = 0.0, ends[1]
        assert (one.low, one.high) == pytest.approx(ends, abs=1e-12)
