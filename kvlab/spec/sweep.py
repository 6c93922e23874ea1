"""`sweeps/*.yaml`: one question over one experiment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from kvlab.errors import Problem
from kvlab.own_extensions import extend, find_members
from kvlab.spec import size_config as sizes
from kvlab.spec import spec_model as spec
from kvlab.spec import sweep_validation as rules
from kvlab.spec.cell_selection import Selection, select_cells
from kvlab.spec.decide_config import DecideConfig, find_claim_problems, list_claims
from kvlab.spec.designs import DESIGNS, DesignError, list_design_names
from kvlab.spec.experiment import Experiment
from kvlab.spec.overrides import SCALED_KEYS, apply_patch, find_scale_problems, resolve_path_value
from kvlab.spec.search_config import SearchConfig
from kvlab.spec.seeds_config import Seeds, StagedSeeds
from kvlab.spec.staged_seeds import SeedsField
from kvlab.spec.validation_errors import FieldError, list_field_errors, raise_once
from kvlab.spec.yaml_reader import YamlDocument

SEARCH_FACTOR = "point"
"""The factor whose levels are the suggestions of a search; ``base`` is its baseline."""


def _normalize_level_names(value: Any) -> Any:
    return tuple(map(spec.normalize_level_name, value if isinstance(value, list) else [value]))


LevelName = Annotated[spec.Name, BeforeValidator(spec.normalize_level_name)]
LevelNames = Annotated[tuple[spec.Name, ...], BeforeValidator(_normalize_level_names)]
DesignName = Annotated[str, spec.OneOf(list_design_names)]
LevelRule = dict[spec.Name, LevelNames]
Levels = dict[LevelName, dict[spec.DottedKey, Any]]
SectionNames = Annotated[spec.TupleOf[spec.Name], Field(min_length=1), spec.once("a section")]


class FailuresConfig(spec.SpecModel):
    """`failures`: policies by class of failure. None of it changes what a trial computes.

    A loss that diverges is a result, and bad data or an impossible request is recorded at once:
    neither gets better when it is tried again.
    """

    killed_retries: spec.NonNegativeInt = 3
    """Starts again after its process died, in a row without progress. Unit: starts. Example: 5"""
    backoff_seconds: Annotated[float, Field(ge=0.0, le=86_400.0)] = 1.0
    """Wait before the first of those; doubled each time, up to 5 min. Unit: seconds. Example: 10"""
    out_of_memory: Literal["shrink", "fail"] = "shrink"
    """Of the device or of the host. shrink: again with a smaller microbatch (same mathematics),
    then alone on its GPU.
    Example: fail"""
    same_error: spec.NonNegativeInt = 3
    """Stop when this many trials fail at the same place; 0 never. Unit: trials. Example: 1"""


class ReportConfig(spec.SpecModel):
    """`report`: which sections, in which order. It never enters a fingerprint."""

    # The table of sections stands above this package: commands that read a sweep check the names.

    sections: SectionNames | None = None
    """Names of sections, in order.
    Default: all that have something to say. Example: [answer, effects, pareto]"""


CellKey = frozenset[tuple[str, str]]


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
    def key(self) -> CellKey:
        """The levels, whatever their order."""
        return frozenset(self.levels.items())

    @property
    def source_levels(self) -> dict[str, str] | None:
        """The levels of the cell that this one starts from; None if it starts from no cell.

        They are the cell's own levels except for those that ``init_from`` names.
        """
        init_from = self.experiment.training.init_from
        return {**self.levels, **init_from} if isinstance(init_from, dict) else None

    @property
    def source_key(self) -> CellKey | None:
        """The `key` of the cell that this one starts from; None if it starts from no cell."""
        return None if self.source_levels is None else frozenset(self.source_levels.items())

    @property
    def label(self) -> str:
        return " ".join(f"{factor}={level}" for factor, level in self.levels.items())


@dataclass(frozen=True)
class SweepSource:
    """Where a loaded sweep was read from.

    Attributes:
        folder: the folder of the sweep's file, which its paths are relative to.
    """

    document: YamlDocument = field(repr=False)
    base_document: YamlDocument = field(repr=False)
    base: dict[str, Any] = field(repr=False)
    folder: str
    scale: str = ""


@extend("sweep")
class Sweep(spec.SpecModel):
    """One question: a base experiment, factors with named levels, a design, seeds.

    ``baseline`` names the level of every factor that deltas are taken against; the default
    is each factor's first. `kvlab.spec.cell_selection` says how the other keys make the cells.
    """

    name: spec.Name = "sweep"
    """Name of the sweep, of its record and its report. Default: the file's name. Example: heads"""
    question: Annotated[str, Field(min_length=1)]
    """The question, in words. Example: 'What does each K/V head cost?'"""
    experiment: Annotated[str, Field(min_length=1)]
    """Path of the base experiment, from this file. Example: ../experiments/small.yaml"""
    factors: dict[spec.Name, Annotated[Levels, Field(min_length=1)]] = {}
    """By factor and level, what the level changes: a patch of dotted keys.
    Example: {heads: {mha: {}, mqa: {model.n_kv_head: 1}}}"""
    baseline: dict[spec.Name, LevelName] = {}
    """The level of each factor that differences are taken against.
    Default: the first level of each factor. Example: {heads: mqa}"""
    design: Annotated[
        DesignName, Field(description=f"One of {', '.join(DESIGNS)}; fractional:N keeps 1/N.")
    ] = "full"
    """Example: one_factor"""
    designs: dict[DesignName, Seeds] = {}
    """Several designs, each with its seeds, as one. Example: {full: [0], one_factor: 3}"""
    when: dict[spec.Name, LevelRule] = {}
    """By factor, the levels of factors above it without which it does not apply.
    Example: {window: {horizon: hybrid}}"""
    target: dict[spec.Name, LevelName] = {}
    """The reduction of a factor with several other levels.
    Example: {heads: mqa}, design: leave_one_out"""
    listed_cells: Annotated[spec.TupleOf[dict[spec.Name, LevelName]], spec.once("a cell")] = Field(
        default=(), alias="cells"
    )
    """The cells of design: cells. A factor that is left out is at its baseline.
    Example: [{heads: mqa, position: rope}], design: cells"""
    exclude: spec.TupleOf[LevelRule] = ()
    """Drops every cell that has all of a rule. Example: [{heads: mqa, position: rope}]"""
    include: spec.TupleOf[LevelRule] = ()
    """Adds cells. A factor that is left out is at its baseline.
    Example: [{heads: mqa, position: rope}], design: one_factor"""
    match: Annotated[str, spec.OneOf(lambda: sizes.MATCH_MODES)] = "none"
    """Set model.ffn_dim by cell, so that every cell has the baseline's parameters or training FLOPs
    a token within 0.5%.
    Example: parameters"""
    seeds: SeedsField = (0,)
    """A list; a count, as 3 for [0, 1, 2]; or how seeds are added in stages, where undecided.
    Example: [0, 1, 2]"""
    failures: FailuresConfig = FailuresConfig()
    """What happens after a failure. Example: {killed_retries: 5}"""
    search: SearchConfig | None = None
    """Instead of factors: look for the best in a space.
    Default: none. Example: {choices: {model.n_kv_head: [1, 2, 4]}, objectives: [loss_served],
    trials: 20}"""
    decide: DecideConfig = DecideConfig()
    """The claims that are tested, and the difference that does not matter.
    Example: {margin: 0.02}"""
    size: sizes.SizeConfig | None = None
    """Fit effects against the size of the model, and predict them.
    Default: none. Example: {factor: model}"""
    report: ReportConfig = ReportConfig()
    """Which sections the report has. Example: {sections: [answer, effects]}"""
    scales: Annotated[
        dict[spec.Name, dict[str, Any]],
        Field(
            description="The same question at other sizes, by name: what stands there in place of"
            f" {', '.join(SCALED_KEYS)}. --scale NAME plans and runs one."
        ),
    ] = {}
    """Example: {gpu: {experiment: ../experiments/gpt2-124m.yaml, seeds: 3}}"""

    _source: SweepSource | None = None
    _cells: tuple[Cell, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _add_search_factor(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("search") is not None and "factors" not in data:
            return {**data, "factors": {SEARCH_FACTOR: {"base": {}}}}
        return data

    @field_validator("baseline")
    @classmethod
    def _fill_baseline(cls, baseline: dict[str, str], info: Any) -> dict[str, str]:
        factors = info.data.get("factors", {})
        return {**{factor: next(iter(levels)) for factor, levels in factors.items()}, **baseline}

    def _find_problems(self) -> spec.Problems:
        steps = (  # each relies on those before it
            rules.find_search_problems(self, SEARCH_FACTOR),
            chain(rules.find_name_problems(self), rules.find_unused_key_problems(self)),
            chain(*(find(self) for find in find_members("sweep_problems").values())),
            sizes.find_size_problems(self),
            find_claim_problems(self.decide, self.factors, self.baseline),
            find_scale_problems(self),
        )
        for step in steps:
            if problems := list(step):
                yield from problems
                return
        try:
            baseline = self.selection.cells[:1]
        except DesignError as error:
            yield error.field, error.message
        else:
            if not baseline or baseline[0].levels != self.baseline:
                yield "exclude", "drops the baseline cell, which every delta needs; narrow the rule"

    def with_source(self, source: SweepSource) -> "Sweep":
        """Return a copy that knows where it was read from, with every cell checked."""
        sweep = self.model_copy()
        sweep._source = source
        sweep._cells = sizes.match_sizes(sweep, sweep._make_cells())
        sizes.check_sizes(sweep, sweep._cells)
        rules.check_scored_text(sweep, sweep._cells)
        rules.check_search_resources(sweep, sweep._cells)
        return sweep

    @property
    def size_factor(self) -> str | None:
        """The factor whose levels are sizes of the model, if the sweep has `size`."""
        return self.size.factor if self.size is not None else None

    @property
    def level_names(self) -> dict[str, tuple[str, ...]]:
        """The levels of every factor, that of the baseline first."""
        return {
            factor: tuple(dict.fromkeys((self.baseline[factor], *levels)))
            for factor, levels in self.factors.items()
        }

    @property
    def design_seeds(self) -> dict[str, tuple[int, ...]]:
        """Every design of this sweep with its seeds, the most where they are added in stages."""
        seeds = self.seeds.most if isinstance(self.seeds, StagedSeeds) else self.seeds
        return self.designs or {self.design: seeds}

    @property
    def claims(self) -> tuple[str, ...]:
        """What the sweep decides, as ``factor=level``; see `decide`."""
        return list_claims(self.decide, self.factors, self.baseline, self.size_factor)

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
        """Where the sweep was read from. Only sweeps of `load_sweep` have it."""
        assert self._source is not None, "a Sweep comes from load_sweep"
        return self._source

    @property
    def base(self) -> Experiment:
        """The base experiment, before any level."""
        return Experiment.model_validate(self.source.base)

    def cells(self) -> tuple[Cell, ...]:
        """Return every cell of the design as a checked experiment, the baseline first."""
        assert self._source is not None, "a Sweep comes from load_sweep"
        return self._cells

    def _make_cells(self) -> tuple[Cell, ...]:
        cells: list[Cell] = []
        problems: list[Problem] = []
        patches = {f: {n: self.patch(f, n) for n in own} for f, own in self.factors.items()}
        for selected in self.selection.cells:
            applied = {f: lvl for f, lvl in selected.levels.items() if f not in selected.off}
            data = self.source.base
            for factor, level in applied.items():
                data = apply_patch(data, patches[factor][level])
            try:
                experiment = Experiment.model_validate(data)
                cells.append(Cell(selected.levels, experiment, selected.seeds, selected.off))
            except ValidationError as error:
                errors = list_field_errors(error, Experiment, data)
                problems += [self.locate(one, applied) for one in errors]
        raise_once(problems)
        return tuple(cells)

    def patch(self, factor: str, level: str) -> dict[str, Any]:
        """Return what a level sets, with paths relative to the sweep's file resolved."""
        folder = Path(self.source.folder)
        patch = self.factors[factor][level]
        return {key: resolve_path_value(key, value, folder) for key, value in patch.items()}

    def locate(self, error: FieldError, levels: Mapping[str, str]) -> Problem:
        """Return an error of a cell as a problem with its location in a file.

        The location is the level whose patch sets the key; else a level that sets another key of
        the same section, with the cell named; else the base experiment.
        """
        path, message, at_key, _ = error
        dotted = ".".join(map(str, path))
        problem = self.source.document.problem
        set_keys = [
            ("factors", factor, level, key)
            for factor, level in reversed(list(levels.items()))
            for key in self.factors.get(factor, {}).get(level, {})
        ]
        for place in set_keys:
            key = place[-1]
            if f"{dotted}.".startswith(f"{key}.") or (at_key and key.startswith(f"{dotted}.")):
                inner = path[key.count(".") + 1 :]
                return problem((*place, *inner), message, at_key=at_key)
        label = ", ".join(f"{factor}: {level}" for factor, level in levels.items())
        section = f"{path[0]}." if path else ""
        for place in set_keys:
            if place[-1].startswith(section):
                text = f"{message} (in the cell {label}; exclude it or change a level)"
                return problem(place, text)
        return self.source.base_document.problem(path, message, at_key=at_key)
