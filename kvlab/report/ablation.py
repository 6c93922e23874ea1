"""The compact ablation: one row a cell, as a paper prints it, in numbers without a format."""

from dataclasses import dataclass

from kvlab.analysis.permutation_tests import ServingGap
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report.pareto_front import memory_front


@dataclass(frozen=True)
class AblationRow:
    """One cell against the baseline.

    Attributes:
        levels: The cell.
        seeds: Number of seeds at which the primary metric was measured.
        value: Mean of the primary metric over seeds; None if it was not measured.
        difference: Mean paired difference from the baseline; None for the baseline itself, and
            where the two share no seed.
        interval: Ends of the simultaneous interval of the difference; None if it was not tested.
        verdict_name: Name of the verdict on the difference in
            `kvlab.analysis.verdicts.VERDICTS`; empty without a difference.
        kv_bytes: Exact bytes of one sequence's cache at block size; None if unknown.
        kv_factor: The baseline's bytes divided by the cell's.
        parameters: Parameters of the model; None if unknown.
        parameter_change: Relative difference from the baseline's parameters.
        gap: The serving gap; None if the cell was not measured through the cache.
    """

    levels: Levels
    seeds: int
    value: float | None
    difference: float | None
    interval: tuple[float, float] | None
    verdict_name: str
    kv_bytes: int | None
    kv_factor: float | None
    parameters: int | None
    parameter_change: float | None
    gap: ServingGap | None


def list_ablation(study: Study, max_rows: int) -> list[AblationRow]:
    """Return the rows of a study, in the design's order.

    Args:
        study: The study.
        max_rows: Number of rows after which cells are left out. The baseline is kept, then the
            cells on the front of memory against quality, the smallest first, then those that
            change one factor.
    """
    return [_make_row(study, levels) for levels in _select_cells(study, max_rows)]


def _select_cells(study: Study, max_rows: int) -> list[Levels]:
    cells = [
        levels for levels in study.cells if any(r.is_done for r in study.cells[levels].values())
    ]
    if len(cells) <= max_rows:
        return cells
    front = [point.levels for point in memory_front(study) if point.is_on_front]

    def rank(levels: Levels) -> tuple[int, int]:
        changed = study.n_changed_factors(levels)
        if changed and levels in front:
            return 1, front.index(levels)
        return 0 if not changed else 2 if changed == 1 else 3, study.cell_index(levels)

    return sorted(sorted(cells, key=rank)[:max_rows], key=study.cell_index)


def _make_row(study: Study, levels: Levels) -> AblationRow:
    metric = study.primary_metric
    difference, interval, verdict_name = _compare(study, levels)
    stored, base_stored = study.kv_bytes(levels), study.kv_bytes(study.baseline)
    count, base_count = study.parameters(levels), study.parameters(study.baseline)
    return AblationRow(
        levels,
        len(study.values(levels, metric)),
        study.mean(levels, metric),
        difference,
        interval,
        verdict_name,
        stored,
        base_stored / stored if stored and base_stored else None,
        count,
        count / base_count - 1 if count and base_count else None,
        study.serving_gaps.get(levels),
    )


def _compare(study: Study, levels: Levels) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return a cell's difference from the baseline, its interval and the name of its verdict."""
    estimate = study.cell_differences.get(levels) if levels != study.baseline else None
    if estimate is None:
        return None, None, ""
    return estimate.value, study.cell_interval(levels), study.cell_verdict(levels)
