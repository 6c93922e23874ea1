"""`size` and `match` of a sweep: trends over the size of the model, and cells of equal size.

size: {factor: model, predict: [100e6]}

names the factor whose levels are sizes, which effects are fitted against.

match: parameters

gives every cell the baseline's size by the width of its MLP. A reduction of the K/V heads also
removes parameters, and its effect then mixes both. Published ablations give them back to the
feed-forward layers (multi-query attention: Shazeer 2019, arXiv 1911.02150; grouped-query attention:
Ainslie et al. 2023, arXiv 2305.13245).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvlab.errors import Problem, SpecError
from kvlab.own_extensions import explain_missing
from kvlab.spec.flops import non_embedding_parameters, parameter_count, training_flops_per_token
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.spec_model import Name, Problems, SpecModel, TupleOf
from kvlab.spec.validation_errors import FieldError, raise_once

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


def find_size_problems(sweep: "Sweep") -> Problems:
    """Yield why the factor of `size` is none, or has too few levels."""
    if sweep.size is None:
        return
    if missing := explain_missing("size"):
        yield "size", missing
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
    """Return the cell of every size that differs from the baseline in the fewest factors."""
    assert sweep.size is not None, "only asked for with size"
    references: dict[str, Cell] = {}

    def count_changes(cell: "Cell") -> int:
        return sum(level != sweep.baseline[factor] for factor, level in cell.levels.items())

    for cell in sorted(cells, key=count_changes):
        references.setdefault(cell.levels[sweep.size.factor], cell)
    return references


def check_sizes(sweep: "Sweep", cells: Sequence["Cell"]) -> None:
    """Check the sizes of a sweep and what is to be predicted from them."""
    if sweep.size is None:
        return
    problem, parameters = sweep.source.document.problem, count_size_parameters(sweep, cells)
    at, name = ("size", "factor"), f"size.factor = {sweep.size.factor}"
    if len(parameters) < MIN_SIZES:
        text = f"{name} has cells of {len(parameters)} sizes, and a trend needs {MIN_SIZES}"
        raise SpecError([problem(at, f"{text}; exclude fewer cells")])
    problems, levels = [], dict[int, str]()
    for level, count in parameters.items():
        if count in levels:
            text = f"{name}: its levels {levels[count]} and {level} both have {count:,} parameters"
            hint = "give each another model.n_layer or model.n_embd"
            problems.append(problem(at, f"{text}; {hint}"))
        levels.setdefault(count, level)
    largest = max(parameters.values())
    limit = MAX_EXTRAPOLATION * largest
    for number, target in enumerate(sweep.size.predict):
        if target > limit:
            text = f"size.predict.{number} = {target:.4g} is more than {MAX_EXTRAPOLATION:g} times"
            rule = f"the largest size, {largest:,} parameters (embeddings not counted)"
            hint = f"write at most {limit:.4g}, or add a larger size"
            problems.append(problem(("size", "predict", number), f"{text} {rule}; {hint}"))
    raise_once(problems)


TOLERANCE = 0.005
"""The largest relative miss of a matched size."""


@dataclass(frozen=True)
class Size:
    """What a cell can have as much of as the baseline; it grows linearly with ``ffn_dim``."""

    count: Callable[[ModelConfig], int]
    unit: str


SIZES: dict[str, Size] = {
    "parameters": Size(parameter_count, "parameters"),
    "flops": Size(training_flops_per_token, "training FLOPs a token"),
}
"""`match` -> what is made equal; ``none`` beside them leaves a cell as its levels make it."""

MATCH_MODES = ("none", *SIZES)


def find_matching_width(model: ModelConfig, size: Size, target: int) -> int:
    """Return the ``ffn_dim`` with which a model comes nearest to ``target``, at least 1."""
    first = size.count(_with_width(model, 1))
    step = size.count(_with_width(model, 2)) - first
    below = 1 + (target - first) // step
    return min(
        (max(1, width) for width in (below, below + 1)),
        key=lambda width: (abs(first + (width - 1) * step - target), width != model.ffn_dim),
    )


def match_sizes(sweep: "Sweep", cells: Sequence["Cell"]) -> tuple["Cell", ...]:
    """Return the cells of a sweep with ``model.ffn_dim`` set as ``match`` says.

    Raises:
        SpecError: A level sets ``model.ffn_dim`` itself, the baseline's size is out of reach, or a
            training starts from weights of another width. Each problem is placed at its level.
    """
    if sweep.match == "none":
        return tuple(cells)
    size, problems, matched = SIZES[sweep.match], list[Problem](), list["Cell"]()
    for cell, baseline in zip(cells, find_baselines(sweep, cells), strict=True):
        target = size.count(baseline)
        width = find_matching_width(cell.experiment.model, size, target)
        errors = _find_match_errors(sweep, cell, size, target, width)
        problems += [sweep.locate(error, cell.levels) for error in errors]
        model = _with_width(cell.experiment.model, width)
        experiment = cell.experiment.model_copy(update={"model": model})
        matched.append(replace(cell, experiment=experiment))
    raise_once(problems)
    return tuple(matched)


def find_baselines(sweep: "Sweep", cells: Sequence["Cell"]) -> list[ModelConfig]:
    """Return for every cell the model that it is matched with.

    It is the baseline's; where `size` names a factor, that of the cell of the same size that
    differs from the baseline in the fewest factors.
    """
    if sweep.size is None:
        return [cells[0].experiment.model] * len(cells)
    references = find_references(sweep, cells)
    return [references[cell.levels[sweep.size.factor]].experiment.model for cell in cells]


def describe_matching(sweep: "Sweep") -> Iterator[str]:
    """Yield how a sweep matches sizes, with its largest miss; nothing if it does not."""
    if sweep.match == "none":
        return
    size, cells = SIZES[sweep.match], sweep.cells()
    targets = [size.count(baseline) for baseline in find_baselines(sweep, cells)]
    counts = [size.count(cell.experiment.model) for cell in cells]
    miss = max(abs(own / target - 1) for own, target in zip(counts, targets, strict=True))
    whose = f"the baseline's {targets[0]:,} {size.unit}"
    if sweep.size is not None:
        whose = f"the {size.unit} of the baseline of its size"
    text = f"match={sweep.match} sets model.ffn_dim by cell for {whose}"
    yield f"{text}; the largest miss is {100 * miss:.2f}%"


def _with_width(model: ModelConfig, width: int) -> ModelConfig:
    return model.model_copy(update={"ffn_dim": width})


def _find_match_errors(
    sweep: "Sweep", cell: "Cell", size: Size, target: int, width: int
) -> Iterator[FieldError]:
    model, path = cell.experiment.model, ("model", "ffn_dim")
    size_factor = sweep.size_factor  # whose levels are sizes as a whole
    levels = ((factor, level) for factor, level in cell.levels.items() if factor != size_factor)
    if any("model.ffn_dim" in sweep.factors[factor][level] for factor, level in levels):
        text = f"model.ffn_dim = {model.ffn_dim} is set by a level, and match sets it by cell"
        yield FieldError(path, f"{text}; remove one")
        return
    reached = {n: size.count(_with_width(model, n)) for n in (width - 1, width, width + 1) if n}
    if abs(reached[width] - target) > TOLERANCE * target:
        sizes = ", ".join(
            f"{n} gives {count:,} ({100 * (count / target - 1):+.2f}%)"
            for n, count in reached.items()
        )
        rule = f"within {100 * TOLERANCE:g}% of the baseline's {target:,} {size.unit}"
        yield FieldError(path, f"model.ffn_dim cannot bring this cell {rule}: {sizes}")
    if width != model.ffn_dim and cell.experiment.training.init_from is not None:
        text = f"match makes the MLP {width} wide instead of {model.ffn_dim}, so the weights of"
        text = f"{text} training.init_from do not fit it; remove one"
        yield FieldError(("training", "init_from"), text)
