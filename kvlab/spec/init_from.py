"""`training.init_from` that names another cell: which cell that is.

`kvlab.spec.cell_validation` checks it, and `kvlab.trial.initial_weights` turns it into the weights
of a trial.
"""

from collections.abc import Mapping

from kvlab.spec.sweep import Cell

INIT_FROM_FIELD = ("training", "init_from")

CellKey = tuple[tuple[str, str], ...]


def cell_key(levels: Mapping[str, str]) -> CellKey:
    """Return levels as a key that does not depend on their order."""
    return tuple(sorted(levels.items()))


def get_source_levels(cell: Cell) -> dict[str, str] | None:
    """Return the levels of the cell that this one starts from; None if it starts from no cell.

    They are the cell's own levels except for those that ``init_from`` names.
    """
    init_from = cell.experiment.training.init_from
    return {**cell.levels, **init_from} if isinstance(init_from, dict) else None
