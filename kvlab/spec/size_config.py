"""`size` of a sweep: the factor whose levels are sizes of the model, for trends over size.

size: {factor: model, predict: [100e6]}
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvlab.errors import SpecError
from kvlab.spec.flops import non_embedding_parameters
from kvlab.spec.spec_model import FieldMessage, Name, SpecModel, TupleOf
from kvlab.spec.validation_errors import FieldError

if TYPE_CHECKING:
    from kvlab.spec.sweep import Cell, Sweep

MIN_SIZES = 3
"""Two sizes give a line and no way to see whether it fits."""

MAX_EXTRAPOLATION = 10.0
"""The largest size that is predicted, in multiples of the largest that is measured."""

Parameters = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class SizeConfig(SpecModel):
    """`size`: fit every effect against the size of the model. Changes no trial."""

    factor: Name
    """The factor whose levels are three or more sizes. Example: model"""
    predict: TupleOf[Parameters] = ()
    """Sizes to predict effects at, in parameters without embeddings but with the output head; at
    most ten times the largest.
    Unit: parameters. Default: ten times the largest size. Example: [5e6, 1.8e7]"""


def find_size_problems(sweep: "Sweep") -> Iterator[FieldMessage]:
    """Yield why the factor of `size` is none, or has too few levels."""
    if sweep.size is None:
        return
    factor = sweep.size.factor
    if factor not in sweep.factors:
        yield "size.factor", f"is not a factor; use one of {', '.join(sweep.factors)}"
    elif len(sweep.factors[factor]) < MIN_SIZES:
        count = len(sweep.factors[factor])
        text = f"has {count} level{'s' * (count > 1)}, and a trend needs {MIN_SIZES} sizes"
        yield "size.factor", f"{text}; add sizes, or leave size out"
    elif len(sweep.factors) == 1:
        yield "size.factor", "is the only factor; add the factor whose effect may change with size"


def count_size_parameters(sweep: "Sweep", cells: Sequence["Cell"]) -> dict[str, int]:
    """Return the parameters of every level of `size`, as `non_embedding_parameters` counts them.

    They are those of its reference, see `find_references`.
    """
    if sweep.size is None:
        return {}
    references = find_references(sweep, cells)
    return {
        level: non_embedding_parameters(references[level].experiment.model)
        for level in sweep.factors[sweep.size.factor]
        if level in references
    }


def find_references(sweep: "Sweep", cells: Sequence["Cell"]) -> dict[str, "Cell"]:
    """Return the cell of every size that differs from the baseline in the fewest factors.

    Args:
        cells: Of the sweep, the baseline first.
    """
    assert sweep.size is not None, "only asked for with size"
    references: dict[str, Cell] = {}
    for cell in sorted(cells, key=lambda cell: _count_changes(sweep, cell)):
        references.setdefault(cell.levels[sweep.size.factor], cell)
    return references


def check_sizes(sweep: "Sweep", cells: Sequence["Cell"]) -> None:
    """Check the sizes of a sweep and what is to be predicted from them.

    Raises:
        SpecError: Sizes are equal, too few have a cell, or a prediction is too far away.
    """
    problems = [
        sweep.source.document.problem(path, message)
        for path, message, _ in _find_problems(sweep, count_size_parameters(sweep, cells))
    ]
    if problems:
        raise SpecError(problems)


def _find_problems(sweep: "Sweep", parameters: dict[str, int]) -> Iterator[FieldError]:
    if sweep.size is None:
        return
    factor = sweep.size.factor
    if len(parameters) < MIN_SIZES:
        text = f"size.factor = {factor} has cells of {len(parameters)} sizes, and a trend needs"
        yield FieldError(("size", "factor"), f"{text} {MIN_SIZES}; exclude fewer cells")
        return
    levels: dict[int, str] = {}
    for level, count in parameters.items():
        if count in levels:
            text = f"size.factor = {factor}: its levels {levels[count]} and {level} both have"
            hint = "give each another model.n_layer or model.n_embd"
            yield FieldError(("size", "factor"), f"{text} {count:,} parameters; {hint}")
        levels.setdefault(count, level)
    largest = max(parameters.values())
    limit = MAX_EXTRAPOLATION * largest
    for number, target in enumerate(sweep.size.predict):
        if target > limit:
            text = f"size.predict.{number} = {target:.4g} is more than {MAX_EXTRAPOLATION:g} times"
            rule = f"the largest size, {largest:,} parameters (embeddings not counted)"
            hint = f"write at most {limit:.4g}, or add a larger size"
            yield FieldError(("size", "predict", number), f"{text} {rule}; {hint}")


def _count_changes(sweep: "Sweep", cell: "Cell") -> int:
    return sum(level != sweep.baseline[factor] for factor, level in cell.levels.items())
