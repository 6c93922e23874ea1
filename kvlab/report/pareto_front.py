"""Pareto fronts of cost against quality, and the best cell within each memory budget."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report.formatting import format_binary_size, format_exact_bytes, format_metric
from kvlab.store.metrics import METRICS

BUDGET_CONTEXT = 1024
"""Context length that budgets are stated for, in tokens."""


@dataclass(frozen=True)
class Cost:
    """A cost of a cell.

    Attributes:
        title: Title of the axis.
        short_title: Title of a column.
        scale: Scale of the axis.
        values: Returns the mean cost of every cell that has it.
        format: Formats one cost with its unit.
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
        lambda size: format_exact_bytes(round(size)),
    ),
    "read": Cost(
        "K/V bytes read per token at block size",
        "read bytes",
        "bytes",
        lambda study: study.means("kv_bytes_read"),
        lambda size: f"reads {format_exact_bytes(round(size))} per token",
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
    """A cell's cost and mean quality.

    Attributes:
        levels: The cell.
        cost: Its cost.
        mean: Its mean quality.
        is_on_front: Whether no other cell is better in one and at least as good in the other.
    """

    levels: Levels
    cost: float
    mean: float
    is_on_front: bool


@dataclass(frozen=True)
class BudgetBest:
    """The best cell among those that fit a memory budget.

    Attributes:
        condition: The budget in words.
        budget: Bytes per `BUDGET_CONTEXT` tokens.
        n_fitting: Number of cells that fit.
        best: The best cell.
        second: The second best cell, if another one fits.
    """

    condition: str
    budget: int
    n_fitting: int
    best: CellPoint
    second: CellPoint | None


def memory_front(study: Study) -> list[CellPoint]:
    """Return every cell with stored bytes and primary quality, the smallest first."""
    return cost_front(study, study.primary_metric, COSTS["stored"])


def cost_front(study: Study, metric: str, cost: Cost) -> list[CellPoint]:
    """Return every cell with a cost and a quality metric, the cheapest first.

    Args:
        study: The study.
        metric: A metric with a better direction.
        cost: The cost.
    """
    return _mark_front(study, metric, cost.values(study))


def _mark_front(study: Study, metric: str, costs: Mapping[Levels, float]) -> list[CellPoint]:
    sign = _loss_sign(metric)
    means = study.means(metric)
    cells = [(levels, costs[levels], mean) for levels, mean in means.items() if levels in costs]
    cells.sort(key=lambda one: (one[1], sign * one[2], study.cell_index(one[0])))
    points: list[CellPoint] = []
    best, best_cost = float("inf"), -1.0
    for levels, cost, mean in cells:
        # Cells that tie in both cost and quality are all on the front: none beats the other.
        is_on_front = sign * mean < best or (sign * mean == best and cost == best_cost)
        if is_on_front:
            best, best_cost = sign * mean, cost
        points.append(CellPoint(levels, cost, mean, is_on_front))
    return points


def _loss_sign(metric: str) -> float:
    """Return the factor that turns a metric into a loss."""
    return -1.0 if METRICS[metric].better == "higher" else 1.0


def bytes_per_context(study: Study) -> dict[Levels, float]:
    """Return each cell's stored bytes per 1,024 tokens, for a sequence of its block size."""
    sizes = {}
    for levels, size in _stored_bytes(study).items():
        block = study.block_size(levels)
        if block:
            sizes[levels] = size * BUDGET_CONTEXT / block
    return sizes


def best_cells_by_budget(study: Study) -> Iterator[BudgetBest]:
    """Yield the best cell of every budget: powers of two below the baseline's bytes.

    It ends at the smallest budget that any cell fits.
    """
    sizes = bytes_per_context(study)
    points = _mark_front(study, study.primary_metric, sizes)
    base = sizes.get(study.baseline)
    if base is None or not points:
        return
    sign = _loss_sign(study.primary_metric)
    ranked = sorted(points, key=lambda point: (sign * point.mean, point.cost))
    budget = 1 << (max(1, int(-(-base // 1))) - 1).bit_length() - 1
    while budget >= points[0].cost:
        fitting = [point for point in ranked if point.cost <= budget]
        second = fitting[1] if len(fitting) > 1 else None
        condition = f"within {format_binary_size(budget)} per {BUDGET_CONTEXT:,} tokens"
        yield BudgetBest(condition, budget, len(fitting), fitting[0], second)
        budget //= 2
