"""Suggest parameters with Optuna's samplers, and estimate how much each parameter matters.

The only module that imports optuna. `check_search` says which metrics a search may optimize or
keep within limits, and asks Optuna whether it has the sampler and takes its arguments.

A study is rebuilt from the history for every suggestion. The seed of its sampler follows from the
search's seed and the number of the suggestion. So a suggestion depends on the seed and the history
alone, and a search that was killed goes on as if it had not been.
"""

import contextlib
import inspect
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError

from kvlab.extensions.search.history import Observation
from kvlab.humanize import suggest_name, summarize_error
from kvlab.spec.experiment import Experiment
from kvlab.spec.overrides import apply_patch
from kvlab.spec.search_config import Limit, SearchConfig, split_sampler
from kvlab.spec.sweep import Sweep
from kvlab.spec.validation_errors import list_field_errors, raise_once
from kvlab.spec.yaml_reader import Key
from kvlab.store.metrics import METRICS
from kvlab.sweep.planning.planner import PlannedTrial

Direction = Literal["minimize", "maximize"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "TPESampler": {"constant_liar": True},
    "NSGAIISampler": {"population_size": 20},  # with Optuna's 50 most of a small budget is random
    "NSGAIIISampler": {"population_size": 20},
    "GPSampler": {"deterministic_objective": True},
}
"""Arguments whose defaults differ from Optuna's."""

_NOT_FOR_SEARCHES = ("BaseSampler", "GridSampler")
"""Samplers that a file cannot name. A grid is a design; BruteForceSampler goes through a space."""

_SEQUENCE_PREFIX = "qmc:"
"""Prefix of the position in a QMCSampler's sequence, which Optuna keeps with the study."""

_STATES = {"open": "RUNNING", "ok": "COMPLETE", "lost": "FAIL"}
"""Optuna's state of a trial, by the state of the observation; PRUNED for the others."""


def suggest_params(
    config: SearchConfig, directions: Sequence[Direction], history: Sequence[Observation]
) -> Observation:
    """Return the next suggestion as an open observation."""
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental samplers warn each time
        storage = optuna.storages.InMemoryStorage()
        sampler = _make_sampler(optuna, config, len(history))
        study = optuna.create_study(storage=storage, sampler=sampler, directions=list(directions))
        study_id = storage.get_study_id_from_name(study.study_name)
        last_attrs = history[-1].sampler_attrs if history else {}
        for key, value in _sequence_attrs(last_attrs).items():
            storage.set_study_system_attr(study_id, key, value)
        distributions = _make_distributions(optuna, config)
        for observation in history:
            study.add_trial(_make_frozen_trial(optuna, observation, distributions, directions))
        trial = study.ask(distributions)
    attrs = _sequence_attrs(storage.get_study_system_attrs(study_id))
    for key, value in study.trials[-1].system_attrs.items():
        with contextlib.suppress(TypeError, ValueError):
            if json.loads(json.dumps(value)) == value:
                attrs[key] = value
    return Observation(dict(trial.params), sampler_attrs=attrs)


def estimate_importances(
    config: SearchConfig, directions: Sequence[Direction], measured: Sequence[Observation]
) -> dict[str, dict[str, float]]:
    """Estimate how much of the variation of every objective each parameter explains.

    fANOVA (Hutter et al., 2014, "An Efficient Approach for Assessing Hyperparameter Importance"):
    a random forest is fitted to the measured trials, and the variance of its prediction is split
    between the parameters.

    Args:
        measured: Observations with values, those beyond a limit included.

    Returns:
        By objective, shares by parameter that sum to 1, the largest first. Without the objectives
        that do not vary.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    distributions = _make_distributions(optuna, config)
    importances = {}
    for number, objective in enumerate(config.objectives):
        values = [observation.values[number] for observation in measured]
        if max(values) == min(values):
            continue
        study = optuna.create_study(direction=directions[number])
        for observation, value in zip(measured, values, strict=True):
            trial = optuna.trial.create_trial(
                params=observation.params, distributions=distributions, value=value
            )
            study.add_trial(trial)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=config.seed)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
        importances[objective] = {name: float(share) for name, share in shares.items()}
    return importances


def _sequence_attrs(attrs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attrs.items() if key.startswith(_SEQUENCE_PREFIX)}


def _make_sampler(optuna: Any, config: SearchConfig, number: int) -> Any:
    name, arguments = split_sampler(config.sampler)
    name = _list_samplers(optuna)[_shorten(name)]
    arguments = {**_DEFAULTS.get(name, {}), **arguments}
    for kind in ("crossover", "mutation"):
        if hasattr(optuna.samplers.nsgaii, str(arguments.get(kind))):
            arguments[kind] = getattr(optuna.samplers.nsgaii, arguments[kind])()
    sampler_class = getattr(optuna.samplers, name)
    if "seed" in inspect.signature(sampler_class).parameters:
        offset = 0 if name == "QMCSampler" else number  # its seed shuffles one sequence
        arguments["seed"] = (config.seed * 1_000_003 + offset) % 2**32
    return sampler_class(**arguments)


def _list_samplers(optuna: Any) -> dict[str, str]:
    """Return Optuna's samplers: name without its ending, in small letters -> name of the class."""
    names = (name for name in optuna.samplers.__all__ if name.endswith("Sampler"))
    return {_shorten(name): name for name in names if name not in _NOT_FOR_SEARCHES}


def _shorten(name: str) -> str:
    return name.replace("_", "").lower().removesuffix("sampler")


def _make_distributions(optuna: Any, config: SearchConfig) -> dict[str, Any]:
    kinds = optuna.distributions
    distributions: dict[str, Any] = {
        key: kinds.CategoricalDistribution(list(range(len(values))))
        for key, values in config.choices.items()
    }
    for key, one in config.ranges.items():
        low, high, step, kind = one.low, one.high, one.step, kinds.FloatDistribution
        if one.whole:
            low, high, step, kind = int(low), int(high), int(step or 1), kinds.IntDistribution
        distributions[key] = kind(low, high, log=one.log, step=step)
    return distributions


def _make_frozen_trial(
    optuna: Any,
    observation: Observation,
    distributions: dict[str, Any],
    directions: Sequence[Direction],
) -> Any:
    """Return an observation as a trial of Optuna.

    With one objective a pruned trial has the losses at its rungs, signed as the objective, by which
    TPE ranks it. With several, samplers read no such values. There it violates a constraint, so
    that it counts as worse than any measured one, the less so the further it came.
    """
    constraints, rung_values = dict(observation.violations), None
    if observation.state == "pruned" and len(directions) == 1:
        sign = 1 if directions[0] == "minimize" else -1
        rung_values = {rung: sign * loss for rung, loss in enumerate(observation.rung_losses)}
    elif observation.state == "pruned":
        constraints["pruned"] = 1.0 / len(observation.rung_losses)
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[_STATES.get(observation.state, "PRUNED")],
        params=observation.params,
        distributions=distributions,
        values=observation.values if observation.state == "ok" else None,
        constraints=constraints or None,
        intermediate_values=rung_values,
        system_attrs=observation.sampler_attrs,
    )


# What a search may ask for


PLANNED_METRICS = {
    **{name: name for name in ("parameters", "kv_bytes", "kv_bytes_per_token")},
    "training_flops": "flops",
}
"""Metrics that are known before a trial runs, as attributes of it; lower is better."""


def check_search(sweep: Sweep) -> None:
    """Raise SpecError unless Optuna has the sampler and takes its arguments, every key of the space
    can have its values, and every objective and limit is a metric that is planned or measured."""
    search = sweep.search
    assert search is not None, "only for sweeps with a search"
    found: list[tuple[tuple[Key, ...], str]] = [*_check_sampler(search), *_check_space(sweep)]
    usable = [m for m, metric in METRICS.items() if metric.better != "neither"]
    names = [*PLANNED_METRICS, *usable]
    asked: list[tuple[str, Key, str]] = [("limits", name, name) for name in search.limits]
    asked += [("objectives", number, name) for number, name in enumerate(search.objectives)]
    for section, key, name in asked:
        text = f"search.{section} names {name}"
        if name not in METRICS and name not in PLANNED_METRICS:
            hint = suggest_name(name, names, f"use one of {', '.join(names)}")
            found.append((("search", section, key), f"{text}, which is not measured; {hint}"))
        elif section == "objectives" and name not in names:
            why = "of which neither more nor less is better; use another"
            found.append((("search", section, key), f"{text}, {why}"))
    raise_once(sweep.source.document.problem(*one) for one in found)


def _check_sampler(config: SearchConfig) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield what is wrong with the sampler, by its path; Optuna tries it on two suggestions."""
    import optuna

    name, arguments = split_sampler(config.sampler)
    path: tuple[str, ...] = ("search", "sampler")
    if not isinstance(config.sampler, str):
        path = (*path, "name")
    samplers = _list_samplers(optuna)
    if _shorten(name) not in samplers:
        names = [*samplers, *samplers.values()]
        hint = suggest_name(name, names, f"use one of {', '.join(samplers.values())}")
        yield path, f"{'.'.join(path)} = {name} is no sampler for a search; {hint}"
        return
    class_name = samplers[_shorten(name)]
    parameters = inspect.signature(getattr(optuna.samplers, class_name)).parameters
    usable = [parameter for parameter in parameters if parameter != "seed"]
    unknown = [argument for argument in arguments if argument not in usable]
    for argument in unknown:
        hint = suggest_name(argument, usable, f"it takes {', '.join(usable) or 'none'}")
        text = f"search.sampler.{argument} is not an argument of {class_name} that a file can set"
        yield ("search", "sampler", argument), f"{text}; {hint}"
    if unknown:
        return
    history: list[Observation] = []
    directions = [objective_direction(objective) for objective in config.objectives]
    try:
        for value in (0.0, 1.0):
            one = suggest_params(config, directions, history)
            history.append(replace(one, state="ok", values=[value] * len(directions)))
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        yield path, f"search.sampler: Optuna refuses {class_name}: {summarize_error(error)}"


def _check_space(sweep: Sweep) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield unknown keys, and values that are wrong whatever other keys have, by their paths."""
    search = sweep.search
    assert search is not None, "only for sweeps with a search"
    tried: list[tuple[tuple[Key, ...], str, Any]] = []
    for key, values in search.choices.items():
        tried += [(("choices", key, number), key, value) for number, value in enumerate(values)]
    for key, interval in search.ranges.items():
        kind = int if interval.whole else float
        ends = (("low", kind(interval.low)), ("high", kind(interval.high)))
        tried += [(("ranges", key, name), key, end) for name, end in ends]
    for path, key, value in tried:
        data = apply_patch(sweep.source.base, {key: value})
        try:
            Experiment.model_validate(data)
        except ValidationError as error:
            for one in list_field_errors(error, Experiment, data):
                if not one.is_rule:
                    yield (
                        ("search", *path[: 2 if one.at_key else 3]),
                        f"search.{path[0]}: {one.message}",
                    )


def objective_direction(objective: str) -> Direction:
    """Return ``minimize`` or ``maximize``."""
    is_higher_better = objective in METRICS and METRICS[objective].better == "higher"
    return "maximize" if is_higher_better else "minimize"


def planned_metrics(planned: PlannedTrial) -> dict[str, float]:
    """Return the values of `PLANNED_METRICS` for one trial."""
    return {name: getattr(planned, attribute) for name, attribute in PLANNED_METRICS.items()}


def limit_violations(limits: Mapping[str, Limit], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each limit is violated, relative to it; 0 or less if it is kept."""
    violations = {}
    for name, limit in limits.items():
        if name in metrics:
            value = float(metrics[name])
            for bound, sign in ((limit.at_most, 1.0), (limit.at_least, -1.0)):
                if bound is not None:
                    violations[f"{name} {sign:+g}"] = sign * (value - bound) / (abs(bound) or 1.0)
    return violations
