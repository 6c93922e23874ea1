"""Optuna's samplers as a sweep names them: short or in full, with what each may be told.

Optuna itself is not imported here. What is left out of ``optuna.samplers`` needs another package
(``CmaEsSampler``), or says nothing that the space does not (``PartialFixedSampler``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic_core import PydanticCustomError

SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "nsga2": "NSGAIISampler",
    "nsga3": "NSGAIIISampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
    "grid": "GridSampler",
    "brute_force": "BruteForceSampler",
}
"""Short name -> the class in ``optuna.samplers``."""

UNSUPPORTED_SAMPLERS = {
    "CmaEsSampler": "needs the package cmaes, which kvlab does not install",
    "PartialFixedSampler": "fixes keys, which leaving them out of the space does too",
}

EXHAUSTIVE_SAMPLERS = ("grid", "brute_force")
"""Those that go through every point of the space."""

MAX_POINTS = 10_000
"""Of a space that is gone through."""

CROSSOVERS = ("UniformCrossover", "BLXAlphaCrossover", "SPXCrossover", "SBXCrossover",
              "VSBXCrossover", "UNDXCrossover")  # fmt: skip


@dataclass(frozen=True)
class SamplerArgument:
    """What an argument may be: of one kind, within bounds, or one of ``choices``."""

    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """The rule that a value breaks, with the way out."""
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

    def schema(self) -> dict[str, Any]:
        if self.choices:
            return {"enum": list(self.choices)}
        names: dict[type, str] = {bool: "boolean", int: "integer", float: "number"}
        bounds = {"minimum": self.low, "maximum": self.high}
        found: dict[str, Any] = {"type": names[self.kind]}
        return found | {key: value for key, value in bounds.items() if value is not None}


_SWITCH, _SHARE = SamplerArgument(bool), SamplerArgument(float, 0.0, 1.0)
_COUNT, _STARTUP = SamplerArgument(int, 1, 10_000), SamplerArgument(int, 0, 10_000)
_GENETIC = {
    "population_size": SamplerArgument(int, 3, 10_000),  # three parents at most are crossed
    "mutation_prob": _SHARE,
    "crossover_prob": _SHARE,
    "swapping_prob": _SHARE,
    "crossover": SamplerArgument(str, choices=CROSSOVERS),
    "mutation": SamplerArgument(str, choices=("PolynomialMutation",)),
}
SAMPLER_ARGUMENTS: dict[str, dict[str, SamplerArgument]] = {
    "tpe": {
        "n_startup_trials": _STARTUP,
        "n_ei_candidates": _COUNT,
        "multivariate": _SWITCH,
        "group": _SWITCH,
        "constant_liar": _SWITCH,
    },
    "random": {},
    "nsga2": _GENETIC,
    "nsga3": {**_GENETIC, "dividing_parameter": _COUNT},
    "gp": {"n_startup_trials": _STARTUP, "deterministic_objective": _SWITCH},
    "qmc": {"qmc_type": SamplerArgument(str, choices=("sobol", "halton")), "scramble": _SWITCH},
    "grid": {},
    "brute_force": {"avoid_premature_stop": _SWITCH},
}
"""Short name -> what the sampler may be told. Functions and seeds cannot be written in a file;
the seed is the search's."""


def split_sampler(sampler: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The short name of a checked sampler, and its arguments."""
    if isinstance(sampler, str):
        return sampler, {}
    return sampler["name"], {key: value for key, value in sampler.items() if key != "name"}


def parse_sampler(value: Any) -> Any:
    """A sampler under its short name; with no arguments, that name alone.

    Raises:
        PydanticCustomError: no such sampler, or an argument that it does not take.
    """
    name, told = (value.get("name"), value) if isinstance(value, dict) else (value, {})
    if not isinstance(name, str):
        known = ", ".join(SAMPLERS)
        text = f"names no sampler; write one of {known}, or {{name: tpe, multivariate: true}}"
        raise _make_error(text, [("", text)])
    short = next((key for key, full in SAMPLERS.items() if name in (key, full)), None)
    if short is None:
        raise _make_error(
            _unknown_sampler_message(name),
            [("name" if isinstance(value, dict) else "", _unknown_sampler_message(name))],
        )
    arguments = {key: _integral_to_int(entry) for key, entry in told.items() if key != "name"}
    problems = list(_argument_problems(short, arguments))
    if problems:
        raise _make_error(problems[0][1], problems)
    return {"name": short, **arguments} if arguments else short


def sampler_schema() -> dict[str, Any]:
    """Of the field, for editors."""
    objects = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [short, SAMPLERS[short]]},
                **{key: argument.schema() for key, argument in arguments.items()},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
        for short, arguments in SAMPLER_ARGUMENTS.items()
    ]
    return {"anyOf": [{"enum": [*SAMPLERS, *SAMPLERS.values()]}, *objects]}


def _argument_problems(short: str, arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    known = SAMPLER_ARGUMENTS[short]
    for key, value in arguments.items():
        if key in known:
            if problem := known[key].problem(value):
                yield key, problem
        else:
            near = get_close_matches(str(key), known, 1)
            way = f"use {', '.join(known)}" if known else "leave it out"
            way = f"did you mean {near[0]}?" if near else way
            yield str(key), f"is no argument of {SAMPLERS[short]} that a file can hold; {way}"
    if arguments.get("group") is True and arguments.get("multivariate") is not True:
        yield "group", "needs multivariate: true; add it"


def _integral_to_int(value: Any) -> Any:
    """``1e2`` is a whole number though YAML reads a float."""
    return int(value) if isinstance(value, float) and value.is_integer() and value > 1 else value


def _unknown_sampler_message(name: str) -> str:
    full = {**{key: key for key in SAMPLERS}, **{value: value for value in SAMPLERS.values()}}
    if name in UNSUPPORTED_SAMPLERS:
        return f"{UNSUPPORTED_SAMPLERS[name]}; use one of {', '.join(SAMPLERS)}"
    near = get_close_matches(name, full, 1) or get_close_matches(name.lower(), full, 1)
    if not near:
        by_case = {key.lower(): key for key in full}
        near = [by_case[one] for one in get_close_matches(name.lower(), by_case, 1)]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"is not one of {', '.join(SAMPLERS)} (or Optuna's name, such as TPESampler){hint}"


def _make_error(text: str, rules: list[tuple[str, str]]) -> PydanticCustomError:
    return PydanticCustomError("rules", "{text}", {"text": text, "rules": rules})
