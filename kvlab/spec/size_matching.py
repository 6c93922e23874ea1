"""`match` of a sweep: every cell gets the baseline's size by the width of its MLP.

A reduction of the K/V heads also removes parameters, and its effect then mixes both. Published
ablations give them back to the feed-forward layers (multi-query attention: Shazeer 2019, arXiv
1911.02150; grouped-query attention: Ainslie et al. 2023, arXiv 2305.13245).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvlab.errors import Problem, SpecError
from kvlab.spec.flops import parameter_count, training_flops_per_token
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.size_config import find_references
from kvlab.spec.spec_model import OneOf
from kvlab.spec.validation_errors import FieldError

if TYPE_CHECKING:
    from kvlab.spec.sweep import Cell, Sweep

MATCH_FACTOR = "match"
"""The factor whose levels are the ways to match sizes, where there are several."""

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


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


MatchMode = Annotated[str, OneOf(lambda: MATCH_MODES)]
MatchModes = Annotated[
    tuple[MatchMode, ...],
    BeforeValidator(_listed),
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(MATCH_MODES)},
                {"type": "array", "items": {"enum": list(MATCH_MODES)}, "minItems": 1},
            ]
        }
    ),
]


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

    Args:
        cells: As their levels make them, the baseline first.

    Raises:
        SpecError: A level sets ``model.ffn_dim`` itself, the baseline's size is out of reach, or a
            training starts from weights of another width. Each problem is placed at its level.
    """
    if sweep.match == ("none",):
        return tuple(cells)
    baselines = find_baselines(sweep, cells)
    problems: dict[tuple[str, int, int], Problem] = {}
    matched = []
    for cell, baseline in zip(cells, baselines, strict=True):
        size = SIZES.get(_get_mode(sweep, cell))
        if size is not None:
            for error in _find_problems(sweep, cell, size, baseline):
                problem = sweep.locate(error, cell.levels)
                problems.setdefault((problem.file, problem.line, problem.column), problem)
            cell = _match_cell(cell, size, baseline)
        matched.append(cell)
    if problems:
        raise SpecError(list(problems.values()))
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
    """Yield a sentence for each way in which a sweep matches sizes, with its largest miss."""
    cells = sweep.cells()
    baselines = find_baselines(sweep, cells)
    for mode in sweep.match:
        size = SIZES.get(mode)
        if size is None:
            continue
        misses = [
            abs(size.count(cell.experiment.model) / size.count(baseline) - 1)
            for cell, baseline in zip(cells, baselines, strict=True)
            if _get_mode(sweep, cell) == mode
        ]
        whose = f"the baseline's {size.count(baselines[0]):,} {size.unit}"
        if sweep.size is not None:
            whose = f"the {size.unit} of the baseline of its size"
        yield (
            f"match={mode} sets model.ffn_dim by cell for {whose}; the largest miss is"
            f" {100 * max(misses, default=0.0):.2f}%"
        )


def _get_mode(sweep: "Sweep", cell: "Cell") -> str:
    return sweep.match[0] if len(sweep.match) == 1 else cell.levels[MATCH_FACTOR]


def _with_width(model: ModelConfig, width: int) -> ModelConfig:
    return model.model_copy(update={"ffn_dim": width})


def _match_cell(cell: "Cell", size: Size, baseline: ModelConfig) -> "Cell":
    model = cell.experiment.model
    width = find_matching_width(model, size, size.count(baseline))
    experiment = cell.experiment.model_copy(update={"model": _with_width(model, width)})
    return replace(cell, experiment=experiment)


def _find_problems(
    sweep: "Sweep", cell: "Cell", size: Size, baseline: ModelConfig
) -> Iterator[FieldError]:
    model, path = cell.experiment.model, ("model", "ffn_dim")
    if _sets_width(sweep, cell.levels):
        text = f"model.ffn_dim = {model.ffn_dim} is set by a level, and match sets it by cell"
        yield FieldError(path, f"{text}; remove one")
        return
    target = size.count(baseline)
    width = find_matching_width(model, size, target)
    if abs(size.count(_with_width(model, width)) - target) > TOLERANCE * target:
        yield FieldError(path, _describe_miss(model, size, target, width))
    init_from = cell.experiment.training.init_from
    if width != model.ffn_dim and init_from is not None:
        text = f"match makes the MLP {width} wide instead of {model.ffn_dim}, so the weights of"
        yield FieldError(
            ("training", "init_from"), f"{text} training.init_from do not fit it; remove one"
        )


def _sets_width(sweep: "Sweep", levels: Mapping[str, str]) -> bool:
    """Return whether a level sets the width, other than one that is a size as a whole."""
    return any(
        "model.ffn_dim" in sweep.factors[factor][level]
        for factor, level in levels.items()
        if sweep.size is None or factor != sweep.size.factor
    )


def _describe_miss(model: ModelConfig, size: Size, target: int, width: int) -> str:
    """Return the rule and the sizes that are nearest to it."""
    reached = {n: size.count(_with_width(model, n)) for n in (width - 1, width, width + 1) if n}
    sizes = ", ".join(
        f"{n} gives {count:,} ({100 * (count / target - 1):+.2f}%)" for n, count in reached.items()
    )
    rule = f"within {100 * TOLERANCE:g}% of the baseline's {target:,} {size.unit}"
    return f"model.ffn_dim cannot bring this cell {rule}: {sizes}"
