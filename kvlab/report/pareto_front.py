"""Cost against quality: which cells no other cell beats, and which is best in a budget."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvlab.report.formatting import format_bytes, format_mebibytes, format_metric
from kvlab.report.study import Study
from kvlab.report.trial_rows import Levels
from kvlab.store.metrics import METRICS

BUDGET_CONTEXT = 1024
"""Tokens that budgets are stated for."""


@dataclass(frozen=True)
class Cost:
    """Something that a cell spends.

    Attributes:
        title: of an axis.
        short: of a column.
        kind: of the axis.
        values: cell -> mean cost, for the cells that have it.
        text: of one cost, with its unit.
        measured: whether it has noise, so that a front through it is one through means.
    """

    title: str
    short: str
    kind: Literal["linear", "bytes"]
    values: Callable[[Study], Mapping[Levels, float]]
    text: Callable[[float], str]
    measured: bool = False


def _stored_bytes(study: Study) -> dict[Levels, float]:
    found = ((levels, study.kv_bytes(levels)) for levels in study.cells)
    return {levels: count for levels, count in found if count is not None}


COSTS: dict[str, Cost] = {
    "stored": Cost(
        "KV bytes of one sequence at block size",
        "stored bytes",
        "bytes",
        _stored_bytes,
        lambda count: format_bytes(round(count)),
    ),
    "read": Cost(
        "K/V bytes read per token at block size",
        "read bytes",
        "bytes",
        lambda study: study.means("kv_bytes_read"),
        lambda count: f"reads {format_bytes(round(count))} per token",
    ),
    "time": Cost(
        "time per output token, p50 (ms)",
        "time per token",
        "linear",
        lambda study: study.means("tpot_ms_p50"),
        lambda time: f"{format_metric('tpot_ms_p50', time)} ms per token",
        measured=True,
    ),
}


@dataclass(frozen=True)
class CellPoint:
    """One cell by its cost and its mean quality. ``front``: no cell is better in one and as
    good in the other."""

    levels: Levels
    cost: float
    mean: float
    front: bool


@dataclass(frozen=True)
class BudgetBest:
    """The best cell of those that fit a budget; ``second`` is the next best, if any.

    ``budget`` is in bytes per 1,024 tokens of context, ``condition`` says so in words.
    """

    condition: str
    budget: int
    fitting: int
    point: CellPoint
    second: CellPoint | None


def memory_front(study: Study) -> list[CellPoint]:
    """Every cell with stored bytes and quality, the smallest first, the front marked."""
    return cost_front(study, study.primary, COSTS["stored"])


def cost_front(study: Study, metric: str, cost: Cost) -> list[CellPoint]:
    """As `points`, for any metric with a better direction and any cost."""
    return _mark_front(study, metric, cost.values(study))


def _mark_front(study: Study, metric: str, costs: Mapping[Levels, float]) -> list[CellPoint]:
    sign = _sign(metric)
    means = study.means(metric)
    known = [(levels, costs[levels], mean) for levels, mean in means.items() if levels in costs]
    known.sort(key=lambda one: (one[1], sign * one[2], study.place(one[0])))
    found: list[CellPoint] = []
    best, best_cost = float("inf"), -1.0
    for levels, spent, mean in known:
        # A tie in both is on the front twice: neither beats the other.
        front = sign * mean < best or (sign * mean == best and spent == best_cost)
        if front:
            best, best_cost = sign * mean, spent
        found.append(CellPoint(levels, spent, mean, front))
    return found


def _sign(metric: str) -> float:
    return -1.0 if METRICS[metric].better == "higher" else 1.0


def bytes_per_context(study: Study) -> dict[Levels, float]:
    """Cell -> stored bytes per 1,024 tokens, of a sequence as long as its block size."""
    found = {}
    for levels, count in _stored_bytes(study).items():
        block = study.block_size(levels)
        if block:
            found[levels] = count * BUDGET_CONTEXT / block
    return found


def best_cells_by_budget(study: Study) -> Iterator[BudgetBest]:
    """The best cell in every power of two below the baseline's bytes, while any cell fits."""
    sizes = bytes_per_context(study)
    known = _mark_front(study, study.primary, sizes)
    base = sizes.get(study.baseline)
    if base is None or not known:
        return
    sign = _sign(study.primary)
    ranked = sorted(known, key=lambda point: (sign * point.mean, point.cost))
    budget = 1 << (max(1, int(-(-base // 1))) - 1).bit_length() - 1
    while budget >= known[0].cost:
        fitting = [point for point in ranked if point.cost <= budget]
        second = fitting[1] if len(fitting) > 1 else None
        condition = f"within {format_binary_size(budget)} per {BUDGET_CONTEXT:,} tokens"
        yield BudgetBest(condition, budget, len(fitting), fitting[0], second)
        budget //= 2


def format_binary_size(count: int) -> str:
    """A power of two of bytes, as people name it."""
    if count >= 2**20:
        return f"{format_mebibytes(count)} MiB"
    return f"{count // 2**10:,} KiB" if count >= 2**10 else f"{count} bytes"
