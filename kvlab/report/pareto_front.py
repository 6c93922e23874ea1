"""Pareto fronts of cost against quality, and the best cell within each memory budget.

Cells that diverged at any seed are in neither: `Study.ranked_means`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvlab.analysis.rankings import Best
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_bytes, format_count
from kvlab.report.formatting import format_metric
from kvlab.report.table_columns import join_names
from kvlab.store.metrics import METRICS

BUDGET_CONTEXT = 1024
"""Context length that budgets are stated for, in tokens."""


@dataclass(frozen=True)
class Cost:
    """A cost of a cell.

    Attributes:
        values: Returns the mean cost of every cell that has it.
    """

    title: str
    short_title: str
    scale: Literal["linear", "bytes"]
    values: Callable[[Study], Mapping[Levels, float]]
    format: Callable[[float], str]


def _stored_bytes(study: Study) -> dict[Levels, float]:
    sizes = ((levels, study.kv_bytes(levels)) for levels in study.cells)
    return {levels: size for levels, size in sizes if size is not None}


COSTS: dict[str, Cost] = {
    "stored": Cost(
        "KV bytes of one sequence at block size",
        "stored bytes",
        "bytes",
        _stored_bytes,
        lambda size: format_bytes(round(size)),
    ),
    "read": Cost(
        "K/V bytes read per token at block size",
        "read bytes",
        "bytes",
        lambda study: study.means("kv_bytes_read"),
        lambda size: f"reads {format_bytes(round(size))} per token",
    ),
    "time": Cost(
        "time per output token, p50 (ms)",
        "time per token",
        "linear",
        lambda study: study.means("tpot_ms_p50"),
        lambda time: f"{format_metric('tpot_ms_p50', time)} ms per token",
    ),
}


@dataclass(frozen=True)
class CellPoint:
    """A cell's cost and quality.

    Attributes:
        mean: Its mean in the metric, as ranked: see `kvlab.analysis.rankings`.
        quality: What the front is of: the mean, or the difference from the cell's reference.
        is_on_front: Whether no other cell is better in one and at least as good in the other.
        rivals: Of a cell on the front: cells of at most its cost that it is not told apart from,
            in order of cost. It may be on the front by chance.
    """

    levels: Levels
    cost: float
    mean: float
    quality: float
    is_on_front: bool
    rivals: tuple[Levels, ...] = ()


@dataclass(frozen=True)
class BudgetBest:
    """The best cell among those that fit a memory budget.

    Attributes:
        budget: Bytes per `BUDGET_CONTEXT` tokens.
        n_fitting: Number of cells that fit and did not diverge.
        choice: The same cell with those that may be the best instead, for all budgets together.
    """

    condition: str
    budget: int
    n_fitting: int
    point: CellPoint
    choice: Best


def memory_front(study: Study) -> list[CellPoint]:
    """Return every cell by what it stores and what it loses against its reference.

    The smallest come first. Where references differ in bytes, as models of several sizes do, a cell
    is placed by its part of its reference's bytes.
    """
    ranked = study.ranked_means(study.primary_metric)
    quality = {c: 0.0 for c in study.estimand.references if c in ranked}
    quality |= {c: found.value for c, found in study.comparisons.items() if c in ranked}
    costs = _stored_bytes(study)
    if is_relative(study):
        bases = {levels: costs.get(study.estimand.reference(levels)) for levels in costs}
        costs = {c: size / base for c, size in costs.items() if (base := bases[c])}
    return _mark_front(study, study.primary_metric, costs, quality)


def is_relative(study: Study) -> bool:
    """Whether the references of a study differ in bytes."""
    return len({study.kv_bytes(levels) for levels in study.estimand.references}) > 1


def cost_front(study: Study, metric: str, cost: Cost) -> list[CellPoint]:
    """Return every cell with a cost and a quality metric, the cheapest first.

    Args:
        metric: A metric with a better direction.
    """
    return _mark_front(study, metric, cost.values(study), study.ranked_means(metric))


def _mark_front(
    study: Study, metric: str, costs: Mapping[Levels, float], quality: Mapping[Levels, float]
) -> list[CellPoint]:
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    means, ranking = study.ranked_means(metric), study.ranking(metric)
    cells = [(levels, costs[levels], value) for levels, value in quality.items() if levels in costs]
    cells.sort(key=lambda one: (one[1], sign * one[2], study.cell_index(one[0])))
    points: list[CellPoint] = []
    best, best_cost = float("inf"), -1.0
    for levels, cost, value in cells:
        # Cells that tie in both cost and quality are all on the front: none beats the other.
        is_on_front = sign * value < best or (sign * value == best and cost == best_cost)
        rivals: tuple[Levels, ...] = ()
        if is_on_front:
            best, best_cost = sign * value, cost
            cheaper = (point.levels for point in points)
            rivals = tuple(one for one in cheaper if not ranking.told_apart(levels, one))
        points.append(CellPoint(levels, cost, means[levels], value, is_on_front, rivals))
    return points


def bytes_per_context(study: Study) -> dict[Levels, float]:
    """Return each cell's stored bytes per 1,024 tokens, for a sequence of its block size."""
    blocks = {levels: study.block_size(levels) for levels in study.cells}
    sizes = _stored_bytes(study).items()
    return {c: size * BUDGET_CONTEXT / block for c, size in sizes if (block := blocks[c])}


def best_cells_by_budget(study: Study) -> list[BudgetBest]:
    """Return the best cell of every budget: powers of two below the baseline's bytes.

    It ends at the smallest budget that any cell fits.
    """
    sizes = bytes_per_context(study)
    means = study.ranked_means(study.primary_metric)
    points = {p.levels: p for p in _mark_front(study, study.primary_metric, sizes, means)}
    base = sizes.get(study.baseline)
    if base is None or not points:
        return []
    smallest = min(point.cost for point in points.values())
    budget = 1 << (max(1, int(-(-base // 1))) - 1).bit_length() - 1
    fitting: dict[int, list[Levels]] = {}
    while budget >= max(smallest, 1):  # a forged record may have less
        fitting[budget] = [c for c, point in points.items() if point.cost <= budget]
        budget //= 2
    ranking = study.ranking(study.primary_metric)
    n_choices = len({frozenset(cells) for cells in fitting.values()})
    choices = {size: ranking.best(cells, choices=n_choices) for size, cells in fitting.items()}
    return [
        BudgetBest(
            f"within {format_bytes(size)} per {BUDGET_CONTEXT:,} tokens",
            size,
            len(fitting[size]),
            points[choice.levels],
            choice,
        )
        for size, choice in choices.items()
        if choice is not None
    ]


def describe_divergence(study: Study) -> str:
    """Name the cells that diverged, in a clause; empty without any."""
    counts = [
        f"{study.label(levels)} at {count} of {format_count(len(study.cells[levels]), 'seed')}"
        for levels, count in study.diverged_cells.items()
    ]
    return f" (not ranked, since trials diverged: {join_names(counts)})" if counts else ""
