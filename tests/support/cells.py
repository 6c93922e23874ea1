"""Cells and studies from losses, without a store."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.store import Store
from tests.support.record_factory import FACTORS as RECORDED

Cells = dict[Levels, dict[int, TrialRow]]
FACTORS = {name: RECORDED[name] for name in ("heads", "position", "sharing")}


def make_cells(
    losses: Mapping[Levels, Sequence[float]],
    metric: str = "loss",
    *,
    training: Callable[[Levels], object] = lambda cell: cell,
    status: Callable[[Levels, int], str] = lambda _cell, _seed: "done",
    record: Callable[[Levels], Mapping[str, Any]] = lambda _cell: {},
) -> Cells:
    """Return rows by cell and seed, from the losses of every cell at seeds 0, 1, ...

    Args:
        losses: NaN where there is no trial.
        metric: What they are.
        training: Names the trained weights of a cell, which cells may share.
        status: Of a trial.
        record: What trials of a cell record.
    """
    return {
        cell: {
            seed: TrialRow(
                cell, seed, f"{cell} {seed}", status(cell, seed), f"{training(cell)} {seed}",
                {metric: float(loss)}, record=record(cell),
            )
            for seed, loss in enumerate(row)
            if not math.isnan(loss)
        }
        for cell, row in losses.items()
    }  # fmt: skip


def make_study(cells: Cells, factors: Mapping[str, Sequence[str]], **sweep: Any) -> Study:
    """Return a study of cells; ``sweep`` are further keys of its description."""
    rows = [row for by_seed in cells.values() for row in by_seed.values()]
    baseline = {factor: levels[0] for factor, levels in factors.items()}
    described = {"name": "m", "factors": factors, "baseline": baseline, **sweep}
    return Study(Store("nowhere"), described, rows)
