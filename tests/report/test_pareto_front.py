"""Fronts and budgets, against a slow definition and on numbers that can be done by hand."""

import random

import pytest

from kvlab.report.pareto_front import COSTS, best_cells_by_budget, find_front
from tests.report.reading import load, markdown
from tests.support.record_factory import Record


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    return load(Record(items=12, noise=0.2), tmp_path_factory.mktemp("noisy"))


def beaten(one, others, sign):
    """Another is as good in both and better in one."""
    own, *points = ((p.cost, sign * p.quality) for p in (one, *others))
    return any(p != own and p[0] <= own[0] and p[1] <= own[1] for p in points)


@pytest.mark.parametrize("metric", ["loss_served", "hellaswag_acc_norm", "tokens_per_second"])
@pytest.mark.parametrize("cost", list(COSTS))
def test_fronts_by_their_definition(noisy, metric, cost):
    found = find_front(noisy, cost, metric)
    sign = 1 if metric == "loss_served" else -1
    assert len(found) == 24
    on_front = {p.levels for p in found if p.is_on_front}
    assert on_front == {p.levels for p in found if not beaten(p, found, sign)}
    for point in found:
        assert {*point.rivals} <= {p.levels for p in found if p.cost <= point.cost} - {point.levels}
    assert [p.cost for p in found] == sorted(p.cost for p in found)


class Sized(Record):
    """Six cells of 3 MiB, 2 MiB, 1 MiB ... per 1,024 tokens, with losses by hand."""

    cost = {"a": 3072, "b": 2048, "c": 1024, "d": 1000, "e": 300, "f": 1}  # noqa: RUF012
    worth = {"a": 4.0, "b": 3.9, "c": 4.2, "d": 4.1, "e": 4.3, "f": 5.0}  # noqa: RUF012

    def bytes(self, levels):
        return self.cost[levels["size"]] * 1024 // 4  # at a block size of 256

    def loss(self, levels, seed):
        return self.worth[levels["size"]] + 0.01 * seed + random.Random(seed).gauss(0, 1e-6)


def test_the_best_cell_in_every_budget_and_the_front(tmp_path):
    study = load(Sized(factors={"size": tuple("abcdef")}), tmp_path)
    assert [p.levels[0] for p in find_front(study) if p.is_on_front] == ["f", "e", "d", "b"]
    found = {
        budget // 1024: (best.levels[0], n_fitting, best.rivals)
        for budget, (n_fitting, best) in best_cells_by_budget(study).items()
    }
    one_cell = dict.fromkeys((256, 128, 64, 32, 16, 8, 4, 2, 1), ("f", 1, ()))
    assert found == {2048: ("b", 5, ()), 1024: ("d", 4, ()), 512: ("e", 2, ()), **one_cell}


def test_a_cell_of_equal_bytes_that_may_be_as_good_is_named_beside_the_front(tmp_path):
    class Noisy(Sized):
        cost = dict(Sized.cost, c=1000)  # noqa: RUF012
        worth = dict(Sized.worth, c=4.1)  # noqa: RUF012

        def loss(self, levels, seed):
            return super().loss(levels, seed) + random.Random(f"{levels}{seed}").gauss(0, 1e-3)

    record = Noisy(factors={"size": tuple("abcdef")})
    points = {p.levels[0]: p for p in find_front(load(record, tmp_path))}
    better, other = ("c", "d") if points["c"].is_on_front else ("d", "c")
    assert (points[better].is_on_front, points[better].rivals) == (True, ((other,),))
    assert not points[other].is_on_front
    assert points["b"].rivals == ()


def test_a_cell_without_its_reference_is_on_no_front(tmp_path):
    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}
    lost = {"heads": "mha", "position": "rope"}
    record = Record(factors=factors, status=lambda c, _: "failed" if c == lost else "done")
    found = {p.levels for p in find_front(load(record, tmp_path))}
    assert found == {("mha", "learned"), ("mqa", "learned")}


def test_what_diverged_stands_on_no_front_and_wins_no_budget(tmp_path):
    """Half of the cells lose trials at random: the luckiest seeds that are left make no winner."""

    def status(levels, seed):
        luck = random.Random(f"{sorted(levels.items())} {seed}")
        return "diverged" if "mqa" in levels.values() and luck.random() < 0.4 else "done"

    class Flattered(Record):
        def loss(self, levels, seed):
            return super().loss(levels, seed) - ("mqa" in levels.values())

    found = load(Flattered(status=status), tmp_path)
    diverged = {row.levels for row in found.rows if row.status == "diverged"}
    assert set(found.diverged_cells) == diverged
    assert 0 < len(diverged) < len(found.cells)
    for cost in COSTS:
        assert not diverged & {p.levels for p in find_front(found, cost)}
    for _, best in best_cells_by_budget(found).values():
        assert not diverged & {best.levels, *best.rivals}
    answer = markdown(found).split("## The answer")[1].split("\n## ")[0]
    assert not [levels for levels in diverged if f"**{found.label(levels)}**" in answer]
