"""The compact ablation: one row a cell, as a paper prints it, in numbers without a format."""

from dataclasses import dataclass

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.serving_gaps import ServingGap
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report.pareto_front import memory_front


@dataclass(frozen=True)
class AblationRow:
    """One cell against its reference.

    Attributes:
        levels: The cell.
        found: The comparison; None of a reference, and where the two share no seed.
        seeds: Number of seeds at which the primary metric was measured.
        value: Mean of the primary metric over seeds; None if it was not measured.
        kv_bytes: Exact bytes of one sequence's cache at block size; None if unknown.
        kv_factor: The reference's bytes divided by the cell's.
        parameters: Parameters of the model; None if unknown.
        parameter_change: Relative difference from the baseline's parameters.
        gap: The serving gap; None if the cell was not measured through the cache.
    """

    levels: Levels
    found: CellComparison | None
    seeds: int
    value: float | None
    kv_bytes: int | None
    kv_factor: float | None
    parameters: int | None
    parameter_change: float | None
    gap: ServingGap | None

    @property
    def difference(self) -> float | None:
        """Mean paired difference from the reference; None without a comparison."""
        return self.found.value if self.found is not None else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the simultaneous interval of the difference; None if it was not tested."""
        found = self.found
        return (found.low, found.high) if found is not None and found.has_interval else None

    @property
    def verdict_name(self) -> str:
        """Name of the verdict in `kvlab.analysis.verdicts.VERDICTS`; empty without one."""
        return self.found.verdict_name if self.found is not None else ""


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
    reference = study.estimand.reference(levels)
    stored, base_stored = study.kv_bytes(levels), study.kv_bytes(reference)
    count, base_count = study.parameters(levels), study.parameters(study.baseline)
    return AblationRow(
        levels,
        study.comparisons.get(levels),
        len(study.values(levels, metric)),
        study.mean(levels, metric),
        stored,
        base_stored / stored if stored and base_stored else None,
        count,
        count / base_count - 1 if count and base_count else None,
        study.serving_gaps.get(levels),
    )
