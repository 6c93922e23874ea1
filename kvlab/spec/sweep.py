"""`failures` of a sweep: what happens when a trial does not end as it should."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from kvlab.errors import Problem, SpecError
from kvlab.spec.cell_selection import SelectedCell, Selection, select_cells
from kvlab.spec.design import DesignError
from kvlab.spec.experiment import Experiment
from kvlab.spec.overrides import apply_patch, resolve_path_value
from kvlab.spec.search_config import SearchConfig
from kvlab.spec.spec_model import (
    NAME_PATTERN,
    NonNegativeInt,
    SpecModel,
    normalize_level_name,
    raise_problems,
)
from kvlab.spec.sweep_validation import name_problems, search_problems, use_problems, zip_problems
from kvlab.spec.validation_errors import DESIGN_PATTERN, FieldError, list_field_errors
from kvlab.spec.yaml_reader import Key, YamlDocument

BackoffSeconds = Annotated[float, Field(ge=0.0, le=86_400.0)]


class FailuresConfig(SpecModel):
    """Policies by class of failure. None of it changes what a trial computes.

    A loss that diverges is a result, and bad data or an impossible request is recorded at once:
    neither gets better when it is tried again.
    """

    killed_retries: NonNegativeInt = Field(
        default=3, description="Starts again after its process died, in a row without progress."
    )
    backoff_seconds: BackoffSeconds = Field(
        default=1.0, description="Wait before the first of those; doubled each time, up to 5 min."
    )
    out_of_memory: Literal["shrink", "fail"] = Field(
        default="shrink",
        description="Of the device or of the host. shrink: again with a smaller microbatch (same"
        " mathematics), then alone on its GPU.",
    )
    same_error: NonNegativeInt = Field(
        default=3, description="Stop when this many trials fail at the same place; 0 never."
    )


# `report` in a sweep: what its report says. It never enters a fingerprint.


def _sections_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ReportConfig(SpecModel):
    """`report`: which sections, in which order.

    The names are those of the table of sections, which stands above this package: the commands
    that read a sweep check them (`kvlab.cli.shared_arguments`).
    """

    sections: (
        Annotated[
            tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...],
            BeforeValidator(_sections_tuple),
            Field(min_length=1),
        ]
        | None
    ) = Field(default=None, description="Names in order; default all that have something to say.")

    def model_post_init(self, _context: Any) -> None:
        names = self.sections or ()
        twice = sorted({name for name in names if names.count(name) > 1})
        raise_problems(("sections", f"names {name} twice; name each once") for name in twice)


# `sweeps/*.yaml`: one question over one experiment.


SEARCH_FACTOR = "point"
"""The factor that a search's suggestions are levels of; ``base`` is its baseline."""

Label = Annotated[str, Field(pattern=NAME_PATTERN)]


def _normalize_level_names(value: Any) -> Any:
    return (
        tuple(map(normalize_level_name, value))
        if isinstance(value, list)
        else (normalize_level_name(value),)
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


LevelName = Annotated[Label, BeforeValidator(normalize_level_name)]
LevelNames = Annotated[tuple[Label, ...], BeforeValidator(_normalize_level_names)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_tuple), Field(min_length=1)]
DesignName = Annotated[str, Field(pattern=DESIGN_PATTERN)]
LevelRule = dict[Label, LevelNames]
LevelRules = Annotated[tuple[LevelRule, ...], BeforeValidator(_tuple)]
FactorGroup = Annotated[tuple[Label, ...], BeforeValidator(_tuple), Field(min_length=2)]


@dataclass(frozen=True)
class Cell:
    """One combination of levels, and the experiment that it makes.

    ``off`` names the factors that do not apply here (`when`): they stand at their baseline
    level and change nothing.
    """

    levels: Mapping[str, str]
    experiment: Experiment
    seeds: tuple[int, ...] = (0,)
    off: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return " ".join(f"{factor}={level}" for factor, level in self.levels.items())


@dataclass(frozen=True)
class SweepSource:
    """Where a loaded sweep came from: both documents and the base experiment's data."""

    document: YamlDocument = field(repr=False)
    base_document: YamlDocument = field(repr=False)
    base: dict[str, Any] = field(repr=False)
    folder: str


class Sweep(SpecModel):
    """One question: a base experiment, factors with named levels, a design, seeds.

    ``baseline`` names the level of every factor that deltas are taken against; the default
    is each factor's first. `kvlab.spec.cell_selection` says how the other keys make the cells.
    """

    name: str = Field(
        default="sweep", pattern=NAME_PATTERN, description="Default: the file's name."
    )
    question: str = Field(min_length=1)
    experiment: str = Field(min_length=1, description="Path of the base experiment, from here.")
    factors: dict[Label, Annotated[dict[LevelName, dict[str, Any]], Field(min_length=1)]] = Field(
        default_factory=dict, description="factor -> level -> patch of dotted keys."
    )
    baseline: dict[Label, LevelName] = Field(default_factory=dict)
    design: DesignName = Field(
        default="full",
        description="full, one_factor, leave_one_out, cumulative, pairwise, cells or fractional:N.",
    )
    designs: dict[DesignName, Seeds] = Field(
        default_factory=dict, description="Several designs, each with its seeds, as one."
    )
    zip: Annotated[tuple[FactorGroup, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="Factors that move together, level by level."
    )
    when: dict[Label, LevelRule] = Field(
        default_factory=dict,
        description="factor -> levels of factors above it, without which it does not apply.",
    )
    target: dict[Label, LevelName] = Field(
        default_factory=dict, description="The reduction of a factor with several other levels."
    )
    cells_asked: Annotated[tuple[dict[Label, LevelName], ...], BeforeValidator(_tuple)] = Field(
        default=(), alias="cells", description="Cells of design: cells; left out is baseline."
    )
    generators: dict[Label, FactorGroup] = Field(
        default_factory=dict, description="fractional: a factor -> those whose product sets it."
    )
    exclude: LevelRules = Field(default=(), description="Drops every cell that has all of a rule.")
    include: LevelRules = Field(default=(), description="Adds cells; left out is baseline.")
    seeds: Seeds = (0,)
    failures: FailuresConfig = FailuresConfig()
    search: SearchConfig | None = Field(
        default=None, description="Instead of factors: look for the best in a space."
    )
    report: ReportConfig = ReportConfig()

    _source: SweepSource | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        raise_problems(search_problems(self))
        if self.search is not None:
            object.__setattr__(self, "factors", {SEARCH_FACTOR: {"base": {}}})
        raise_problems([*name_problems(self), *use_problems(self)])
        first = {factor: next(iter(levels)) for factor, levels in self.factors.items()}
        object.__setattr__(self, "baseline", {**first, **self.baseline})
        raise_problems(zip_problems(self))
        try:
            baseline = self.selection.cells[:1]
        except DesignError as error:
            raise_problems([(error.field, error.message)])
        if not baseline or baseline[0].levels != self.baseline:
            raise_problems(
                [("exclude", "drops the baseline cell, which every delta needs; narrow the rule")]
            )
        return self

    @property
    def design_seeds(self) -> dict[str, tuple[int, ...]]:
        """Every design of this sweep with its seeds."""
        return self.designs or {self.design: self.seeds}

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of all designs."""
        return tuple(dict.fromkeys(s for seeds in self.design_seeds.values() for s in seeds))

    @cached_property
    def selection(self) -> Selection:
        """Levels of every cell, the baseline first, and what each rule did."""
        return select_cells(self)

    @property
    def source(self) -> SweepSource:
        """Where the sweep was read from. Only `load_sweep` makes sweeps that have one."""
        assert self._source is not None, "a Sweep comes from load_sweep"
        return self._source

    @property
    def base(self) -> Experiment:
        """The base experiment, before any level."""
        return Experiment.model_validate(self.source.base)

    def cells(self) -> tuple[Cell, ...]:
        """Every cell of the design as a checked experiment, the baseline first.

        Raises:
            SpecError: some cells are not possible; each problem stands at the level that
                causes it.
        """
        return self._cells

    @cached_property
    def _cells(self) -> tuple[Cell, ...]:
        cells: list[Cell] = []
        problems: dict[tuple[str, int, int], Problem] = {}
        patches = {
            (factor, level): self.patch(factor, level)
            for factor, levels in self.factors.items()
            for level in levels
        }
        for chosen in self.selection.cells:
            data = self.source.base
            for factor, level in chosen.levels.items():
                if factor not in chosen.off:
                    data = apply_patch(data, patches[factor, level])
            try:
                experiment = Experiment.model_validate(data)
                cells.append(Cell(chosen.levels, experiment, chosen.seeds, chosen.off))
            except ValidationError as error:
                for found in list_field_errors(error, Experiment, data):
                    problem = self.place(found, _applied_levels(chosen))
                    problems.setdefault((problem.file, problem.line, problem.column), problem)
        if problems:
            raise SpecError(list(problems.values()))
        return tuple(cells)

    def check(self) -> None:
        """Raises SpecError unless every level patches known keys and every cell is possible."""
        problems = []
        for factor, levels in self.factors.items():
            for level, patch in levels.items():
                for key in patch:
                    if "." not in key or key.startswith(".") or key.endswith("."):
                        text = f"{key} is not section.key; write one such as model.n_kv_head"
                        path = ("factors", factor, level, key)
                        problems.append(self.source.document.problem(path, text, at_key=True))
        if problems:
            raise SpecError(problems)
        self.cells()

    def patch(self, factor: str, level: str) -> dict[str, Any]:
        """What a level sets, with paths as they are from here."""
        folder = Path(self.source.folder)
        patch = self.factors[factor][level]
        return {key: resolve_path_value(key, value, folder) for key, value in patch.items()}

    def place(self, found: FieldError, levels: Mapping[str, str]) -> Problem:
        """A cell's problem at the level whose patch sets the key, else at the base experiment."""
        path, message, at_key = found
        dotted = ".".join(map(str, path))
        document = self.source.document
        for factor, level in reversed(list(levels.items())):
            for key in self.factors[factor][level]:
                unknown_section = at_key and key.startswith(dotted + ".")
                if dotted == key or dotted.startswith(key + ".") or unknown_section:
                    inner = path[key.count(".") + 1 :]
                    where: tuple[Key, ...] = ("factors", factor, level, key, *inner)
                    return document.problem(where, message, at_key=at_key)
        label = ", ".join(f"{factor}: {level}" for factor, level in levels.items())
        section = str(path[0]) + "." if path else ""
        for factor, level in reversed(list(levels.items())):
            for key in self.factors[factor][level]:
                if key.startswith(section):
                    where = ("factors", factor, level, key)
                    text = f"{message} (in the cell {label}; exclude it or change a level)"
                    return document.problem(where, text)
        return self.source.base_document.problem(path, message, at_key=at_key)


def _applied_levels(cell: SelectedCell) -> dict[str, str]:
    return {factor: level for factor, level in cell.levels.items() if factor not in cell.off}
