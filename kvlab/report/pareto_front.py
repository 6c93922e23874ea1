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
        "K/V cache of one sequence at block size",
        "K/V cache",
        "bytes",
        _stored_bytes,
        lambda size: format_bytes(round(size)),
    ),
    "read": Cost(
        "K/V bytes read per token at block size",
        "K/V bytes read",
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
        cost: In the unit of the cost; of bytes a part of its reference's, if `is_relative`.
        mean: Its mean in the metric, as ranked: see `kvlab.analysis.rankings`.
        quality: The difference from its reference, which the front is of.
        is_on_front: Whether no other cell is better in one and at least as good in the other. Of
            references, which differ from themselves by nothing, the baseline alone is on it.
        rivals: Of a cell on the front: cells of at most its cost and with its reference that it is
            not told apart from, in order of cost. It may be on the front by chance.
    """

    levels: Levels
    cost: float
    mean: float
    quality: float
    is_on_front: bool
    rivals: tuple[Levels, ...] = ()


def is_relative(study: Study, cost: str = "stored") -> bool:
    """Whether a cost is in bytes, and the references of a study differ in bytes."""
    sizes = {study.kv_bytes(levels) for levels in study.estimand.references}
    return COSTS[cost].scale == "bytes" and len(sizes) > 1


def find_front(study: Study, cost: str = "stored", metric: str = "") -> list[CellPoint]:
    """Return every cell by a cost and by what it loses against its reference, the cheapest first.

    Where references differ in bytes, as models of several sizes do, a cell is placed by its part of
    its reference's bytes.

    Args:
        cost: A name in `COSTS`.
        metric: A metric with a better direction. Default: the one that decides.
    """
    metric = metric or study.primary_metric
    means, ranking = study.ranked_means(metric), study.ranking(metric)
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    costs = COSTS[cost].values(study)
    if is_relative(study, cost):
        bases = {levels: costs.get(study.estimand.reference(levels)) for levels in costs}
        costs = {c: size / base for c, size in costs.items() if (base := bases[c])}
    cells = []
    for levels in means.keys() & costs.keys():
        value = _find_difference(study, levels, metric)
        if value is not None:
            cells.append((costs[levels], sign * value, study.cell_index(levels), levels))
    if all(study.estimand.reference(levels) == levels for *_, levels in cells) and len(cells) > 1:
        return []  # nothing but references, which differ from themselves by nothing
    points: list[CellPoint] = []
    best, best_cost = float("inf"), -1.0
    cells.sort()
    for size, loss, _, levels in cells:
        # Cells that tie in both cost and quality are all on the front: none beats the other.
        reference = study.estimand.reference(levels)
        is_placed = levels == study.baseline or levels != reference
        is_on_front = is_placed and (loss < best or (loss == best and size == best_cost))
        rivals: tuple[Levels, ...] = ()
        if is_on_front:
            best, best_cost = loss, size
            others = (one for cost, _, _, one in cells if cost <= size and one != levels)
            same = (one for one in others if study.estimand.reference(one) == reference)
            rivals = tuple(one for one in same if not ranking.told_apart(levels, one))
        points.append(CellPoint(levels, size, means[levels], sign * loss, is_on_front, rivals))
    return points


def _find_difference(study: Study, levels: Levels, metric: str) -> float | None:
    """Return a cell's paired difference from its reference; None without a seed in common."""
    reference = study.estimand.reference(levels)
    if levels == reference:
        return 0.0
    if metric == study.primary_metric:
        found = study.comparisons.get(levels)
        return None if found is None else found.value
    estimated = study.ranking(metric).difference(levels, reference)
    return None if estimated is None else estimated.value


def bytes_per_context(study: Study) -> dict[Levels, float]:
    """Return each cell's stored bytes per 1,024 tokens, for a sequence of its block size."""
    blocks = {levels: study.block_size(levels) for levels in study.cells}
    sizes = _stored_bytes(study).items()
    return {c: size * BUDGET_CONTEXT / block for c, size in sizes if (block := blocks[c])}


def best_cells_by_budget(study: Study) -> dict[int, tuple[int, Best]]:
    """Return the best cell of every budget: powers of two below the baseline's bytes.

    It ends at the smallest budget that any cell fits.

    Returns:
        Bytes per `BUDGET_CONTEXT` tokens -> the number of cells that fit and did not diverge, and
        the best of them with those that may be the best instead, for all budgets together.
    """
    sizes, means = bytes_per_context(study), study.ranked_means(study.primary_metric)
    base, ranked = sizes.get(study.baseline), {c: s for c, s in sizes.items() if c in means}
    if base is None or not ranked:
        return {}
    budget = 1 << (max(1, int(-(-base // 1))) - 1).bit_length() - 1
    fitting: dict[int, list[Levels]] = {}
    while budget >= max(min(ranked.values()), 1):  # a forged record may have less
        fitting[budget] = [levels for levels, size in ranked.items() if size <= budget]
        budget //= 2
    ranking = study.ranking(study.primary_metric)
    n_choices = len({frozenset(cells) for cells in fitting.values()})
    choices = {size: ranking.best(cells, choices=n_choices) for size, cells in fitting.items()}
    return {size: (len(fitting[size]), best) for size, best in choices.items() if best is not None}


def describe_divergence(study: Study) -> str:
    """Name the cells that diverged, in a clause; empty without any."""
    counts = [
        f"{study.label(levels)} at {count} of {format_count(len(study.cells[levels]), 'seed')}"
        for levels, count in study.diverged_cells.items()
    ]
    return f" (not ranked, since trials diverged: {join_names(counts)})" if counts else ""
