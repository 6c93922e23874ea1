"""Optuna's samplers as a sweep names them: by a short name or in full, with their arguments.

Optuna itself is not imported here. Samplers of ``optuna.samplers`` that need another package, or
say nothing that the space does not, are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic_core import PydanticCustomError

from kvlab.spec.spec_model import FieldMessage

UNSUPPORTED_SAMPLERS = {
    "CmaEsSampler": "needs the package cmaes, which kvlab does not install",
    "PartialFixedSampler": "fixes keys; remove them from the space instead",
}

MAX_POINTS = 10_000
"""The largest space that an exhaustive sampler goes through."""


@dataclass(frozen=True)
class SamplerArgument:
    """What an argument may be: of one kind, within bounds, or one of ``choices``."""

    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def find_problem(self, value: Any) -> str | None:
        """Return the rule that a value breaks, with a hint; None if it breaks none."""
        if self.choices:
            if value in self.choices:
                return None
            near = get_close_matches(str(value), self.choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"is not one of {', '.join(self.choices)}{hint}"
        if self.kind is bool:
            return None if isinstance(value, bool) else "is not true or false; write one of them"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "is not a number; write one"
        if self.kind is int and not float(value).is_integer():
            return "is not a whole number; write one such as 12"
        if self.low is not None and not value >= self.low:  # also of .nan
            return f"is below {self.low:g}; use {self.low:g} or more"
        if self.high is not None and not value <= self.high:
            return f"is above {self.high:g}; use {self.high:g} or less"
        return None

    def json_schema(self) -> dict[str, Any]:
        if self.choices:
            return {"enum": list(self.choices)}
        names: dict[type, str] = {bool: "boolean", int: "integer", float: "number"}
        bounds = {"minimum": self.low, "maximum": self.high}
        schema: dict[str, Any] = {"type": names[self.kind]}
        return schema | {key: value for key, value in bounds.items() if value is not None}


@dataclass(frozen=True)
class SamplerEntry:
    """One sampler.

    Attributes:
        class_name: in ``optuna.samplers``.
        arguments: those that a file can set. It cannot hold functions, and the seed is the
            search's.
        is_exhaustive: whether it goes through every point of the space.
    """

    class_name: str
    arguments: Mapping[str, SamplerArgument] = field(default_factory=dict)
    is_exhaustive: bool = False


_SWITCH, _SHARE = SamplerArgument(bool), SamplerArgument(float, 0.0, 1.0)
_COUNT, _STARTUP = SamplerArgument(int, 1, 10_000), SamplerArgument(int, 0, 10_000)
_CROSSOVERS = ("UniformCrossover", "BLXAlphaCrossover", "SPXCrossover", "SBXCrossover",
               "VSBXCrossover", "UNDXCrossover")  # fmt: skip
_GENETIC = {
    "population_size": SamplerArgument(int, 3, 10_000),  # up to three parents are crossed
    "mutation_prob": _SHARE,
    "crossover_prob": _SHARE,
    "swapping_prob": _SHARE,
    "crossover": SamplerArgument(str, choices=_CROSSOVERS),
    "mutation": SamplerArgument(str, choices=("PolynomialMutation",)),
}
_TPE = {
    "n_startup_trials": _STARTUP,
    "n_ei_candidates": _COUNT,
    "multivariate": _SWITCH,
    "group": _SWITCH,
    "constant_liar": _SWITCH,
}
_QMC = {"qmc_type": SamplerArgument(str, choices=("sobol", "halton")), "scramble": _SWITCH}

SAMPLERS: dict[str, SamplerEntry] = {
    "tpe": SamplerEntry("TPESampler", _TPE),
    "random": SamplerEntry("RandomSampler"),
    "nsga2": SamplerEntry("NSGAIISampler", _GENETIC),
    "nsga3": SamplerEntry("NSGAIIISampler", {**_GENETIC, "dividing_parameter": _COUNT}),
    "gp": SamplerEntry(
        "GPSampler", {"n_startup_trials": _STARTUP, "deterministic_objective": _SWITCH}
    ),
    "qmc": SamplerEntry("QMCSampler", _QMC),
    "grid": SamplerEntry("GridSampler", is_exhaustive=True),
    "brute_force": SamplerEntry(
        "BruteForceSampler", {"avoid_premature_stop": _SWITCH}, is_exhaustive=True
    ),
}
"""Short name -> sampler: the one table of samplers."""


def split_sampler(sampler: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the short name of a checked sampler, and its arguments."""
    if isinstance(sampler, str):
        return sampler, {}
    return sampler["name"], {key: value for key, value in sampler.items() if key != "name"}


def parse_sampler(value: Any) -> Any:
    """Return a sampler under its short name; without arguments, that name alone.

    Raises:
        PydanticCustomError: the sampler is unknown, or does not take an argument.
    """
    name, written = (value.get("name"), value) if isinstance(value, dict) else (value, {})
    if not isinstance(name, str):
        text = f"names no sampler; write one of {', '.join(SAMPLERS)}"
        raise _make_error([("", f"{text}, or {{name: tpe, multivariate: true}}")])
    short = next((key for key, entry in SAMPLERS.items() if name in (key, entry.class_name)), None)
    if short is None:
        field_name = "name" if isinstance(value, dict) else ""
        raise _make_error([(field_name, _unknown_sampler_message(name))])
    arguments = {key: _integral_to_int(entry) for key, entry in written.items() if key != "name"}
    problems = list(_find_argument_problems(SAMPLERS[short], arguments))
    if problems:
        raise _make_error(problems)
    return {"name": short, **arguments} if arguments else short


def sampler_schema() -> dict[str, Any]:
    """Return the JSON Schema of the field `search.sampler`."""
    objects = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [short, entry.class_name]},
                **{key: argument.json_schema() for key, argument in entry.arguments.items()},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
        for short, entry in SAMPLERS.items()
    ]
    class_names = [entry.class_name for entry in SAMPLERS.values()]
    return {"anyOf": [{"enum": [*SAMPLERS, *class_names]}, *objects]}


def _find_argument_problems(
    entry: SamplerEntry, arguments: dict[str, Any]
) -> Iterator[FieldMessage]:
    for key, value in arguments.items():
        if key in entry.arguments:
            if problem := entry.arguments[key].find_problem(value):
                yield key, problem
        else:
            near = get_close_matches(str(key), entry.arguments, 1)
            hint = f"use {', '.join(entry.arguments)}" if entry.arguments else "leave it out"
            hint = f"did you mean {near[0]}?" if near else hint
            yield str(key), f"is not an argument of {entry.class_name} that a file can set; {hint}"
    if arguments.get("group") is True and arguments.get("multivariate") is not True:
        yield "group", "needs multivariate: true; add it"


def _integral_to_int(value: Any) -> Any:
    """Convert ``1e2``, which YAML reads as a float; 0.0 and 1.0 may be shares."""
    return int(value) if isinstance(value, float) and value.is_integer() and value > 1 else value


def _unknown_sampler_message(name: str) -> str:
    if name in UNSUPPORTED_SAMPLERS:
        return f"{UNSUPPORTED_SAMPLERS[name]}; use one of {', '.join(SAMPLERS)}"
    names = [*SAMPLERS, *(entry.class_name for entry in SAMPLERS.values())]
    names_by_lower_case = {known.lower(): known for known in names}
    near = get_close_matches(name.lower(), names_by_lower_case, 1)
    hint = f"; did you mean {names_by_lower_case[near[0]]}?" if near else ""
    return f"is not one of {', '.join(SAMPLERS)} (or Optuna's name, such as TPESampler){hint}"


def _make_error(problems: list[FieldMessage]) -> PydanticCustomError:
    return PydanticCustomError("rules", "{text}", {"text": problems[0][1], "rules": problems})
