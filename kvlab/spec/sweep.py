"""`sweeps/*.yaml`: one question over one experiment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from kvlab.errors import Problem, SpecError
from kvlab.spec.base import NAME_PATTERN, SpecModel, level_name, refuse
from kvlab.spec.experiment import Experiment
from kvlab.spec.patch import apply_patch
from kvlab.spec.paths import resolve
from kvlab.spec.problems import Found, find_problems
from kvlab.spec.yaml_reader import Document, Key

Label = Annotated[str, Field(pattern=NAME_PATTERN)]


def _labels(value: Any) -> Any:
    return tuple(map(level_name, value)) if isinstance(value, list) else (level_name(value),)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


LevelName = Annotated[Label, BeforeValidator(level_name)]
LevelNames = Annotated[tuple[Label, ...], BeforeValidator(_labels)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class Cell:
    """One combination of levels, and the experiment that it makes."""

    levels: Mapping[str, str]
    experiment: Experiment

    @property
    def label(self) -> str:
        return " ".join(f"{factor}={level}" for factor, level in self.levels.items())


@dataclass(frozen=True)
class SweepSource:
    """Where a loaded sweep came from: both documents and the base experiment's data."""

    document: Document = field(repr=False)
    base_document: Document = field(repr=False)
    base: dict[str, Any] = field(repr=False)
    folder: str


class Sweep(SpecModel):
    """One question: a base experiment, factors with named levels, a design, seeds.

    ``baseline`` names the level of every factor that deltas are taken against; the default
    is each factor's first. ``exclude`` drops every cell that matches all of a rule's levels.
    """

    name: str = Field(
        default="sweep", pattern=NAME_PATTERN, description="Default: the file's name."
    )
    question: str = Field(min_length=1)
    experiment: str = Field(min_length=1, description="Path of the base experiment, from here.")
    factors: dict[Label, Annotated[dict[LevelName, dict[str, Any]], Field(min_length=1)]] = Field(
        min_length=1, description="factor -> level -> patch of dotted keys."
    )
    baseline: dict[Label, LevelName] = Field(default_factory=dict)
    design: Literal["full"] = "full"
    exclude: Annotated[tuple[dict[Label, LevelNames], ...], BeforeValidator(_tuple)] = ()
    seeds: Annotated[tuple[Seed, ...], BeforeValidator(_tuple), Field(min_length=1)] = (0,)

    _source: SweepSource | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        problems = list(self.name_problems("baseline", self.baseline))
        for number, rule in enumerate(self.exclude):
            for factor, levels in rule.items():
                for level in levels:
                    problems += self.name_problems(f"exclude.{number}", {factor: level})
        if len(set(self.seeds)) != len(self.seeds):
            problems.append(("seeds", "names a seed twice; name each once"))
        refuse(problems)
        first = {factor: next(iter(levels)) for factor, levels in self.factors.items()}
        object.__setattr__(self, "baseline", {**first, **self.baseline})
        if any(_matches(rule, self.baseline) for rule in self.exclude):
            refuse(
                [("exclude", "drops the baseline cell, which every delta needs; narrow the rule")]
            )
        return self

    def name_problems(self, where: str, levels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """For each factor or level that the sweep does not have: its place, and what is wrong."""
        for factor, level in levels.items():
            if factor not in self.factors:
                yield f"{where}.{factor}", f"is not a factor; {_one_of(factor, self.factors)}"
            elif level not in self.factors[factor]:
                known = _one_of(level, self.factors[factor])
                yield f"{where}.{factor}", f"is not a level of {factor}; {known}"

    @property
    def source(self) -> SweepSource:
        """Where the sweep was read from. Only `load_sweep` makes sweeps that have one."""
        assert self._source is not None, "a Sweep comes from load_sweep"
        return self._source

    @property
    def base(self) -> Experiment:
        """The base experiment, before any level."""
        return Experiment.model_validate(self.source.base)

    def combinations(self) -> list[dict[str, str]]:
        """Levels of every cell of the design, the baseline first, excluded cells left out."""
        ordered = [
            [self.baseline[factor], *(n for n in levels if n != self.baseline[factor])]
            for factor, levels in self.factors.items()
        ]
        cells = (dict(zip(self.factors, names, strict=True)) for names in product(*ordered))
        return [c for c in cells if not any(_matches(rule, c) for rule in self.exclude)]

    def cells(self) -> list[Cell]:
        """Every cell of the design as a checked experiment.

        Raises:
            SpecError: some cells are not possible; each problem stands at the level that
                causes it.
        """
        cells: list[Cell] = []
        problems: dict[tuple[str, int, int], Problem] = {}
        for levels in self.combinations():
            data = self.source.base
            for factor, level in levels.items():
                data = apply_patch(data, self._patch(factor, level))
            try:
                cells.append(Cell(levels, Experiment.model_validate(data)))
            except ValidationError as error:
                for found in find_problems(error, Experiment, data):
                    problem = self.place(found, levels)
                    problems.setdefault((problem.file, problem.line, problem.column), problem)
        if problems:
            raise SpecError(list(problems.values()))
        return cells

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

    def _patch(self, factor: str, level: str) -> dict[str, Any]:
        folder = Path(self.source.folder)
        patch = self.factors[factor][level]
        return {key: resolve(key, value, folder) for key, value in patch.items()}

    def place(self, found: Found, levels: Mapping[str, str]) -> Problem:
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


def _matches(rule: Mapping[str, tuple[str, ...]], cell: Mapping[str, str]) -> bool:
    return all(cell[factor] in levels for factor, levels in rule.items())


def _one_of(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
