"""Suggestions from Optuna's samplers. The only module that imports optuna.

A study is made anew from the history for every suggestion, with a sampler whose seed follows
from the search's seed and the number of the suggestion. So a suggestion depends on the seed and
the history alone, and a search that was killed goes on as if it had not been.
"""

import json
import logging
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from kvlab.spec.samplers import SAMPLERS, split_sampler
from kvlab.spec.search_config import Range, SearchConfig
from kvlab.sweep.search.search_history import Observation

Direction = Literal["minimize", "maximize"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "tpe": {"constant_liar": True},
    "nsga2": {"population_size": 20},  # Optuna's 50 would draw most of a small budget by chance
    "nsga3": {"population_size": 20},
    "gp": {"deterministic_objective": True},
}
"""Where ours differ from Optuna's."""

_FIXED_SEED_SAMPLERS = ("qmc", "grid")
"""Their seed shuffles a sequence that is gone through, so it stays."""

_STUDY_PREFIX = "qmc:"
"""How far a sequence has been gone through, which Optuna keeps with the study."""


def suggest_params(
    config: SearchConfig, directions: Sequence[Direction], history: Sequence[Observation]
) -> Observation:
    """The next suggestion, open.

    Args:
        directions: ``minimize`` or ``maximize`` for every objective.
        history: every suggestion so far, in the order in which they were made.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental samplers say so each time
        storage = optuna.storages.InMemoryStorage()
        study = optuna.create_study(
            storage=storage,
            sampler=_make_sampler(optuna, config, len(history)),
            directions=list(directions),
        )
        number = storage.get_study_id_from_name(study.study_name)
        for key, value in (history[-1].notes if history else {}).items():
            if key.startswith(_STUDY_PREFIX):
                storage.set_study_system_attr(number, key, value)
        space = _make_distributions(optuna, config)
        for past in history:
            study.add_trial(_make_frozen_trial(optuna, past, space, directions))
        trial = study.ask(space)
    kept = storage.get_study_system_attrs(number).items()
    notes = {key: value for key, value in kept if key.startswith(_STUDY_PREFIX)}
    notes |= study.trials[-1].system_attrs
    return Observation(dict(trial.params), notes={k: v for k, v in notes.items() if _is_json(v)})


def _make_sampler(optuna: Any, config: SearchConfig, number: int) -> Any:
    name, told = split_sampler(config.sampler)
    arguments = {**_DEFAULTS.get(name, {}), **told}
    for kind in ("crossover", "mutation"):
        if kind in arguments:
            arguments[kind] = getattr(optuna.samplers.nsgaii, arguments[kind])()
    if name == "grid":
        arguments["search_space"] = _grid_search_space(config)
    changing = name not in _FIXED_SEED_SAMPLERS
    arguments["seed"] = (config.seed * 1_000_003 + number * changing) % 2**32
    return getattr(optuna.samplers, SAMPLERS[name].class_name)(**arguments)


def _grid_search_space(config: SearchConfig) -> dict[str, list[Any]]:
    points: dict[str, list[Any]] = {
        key: list(range(len(values))) for key, values in config.choices.items()
    }
    return points | {key: asked.points() or [] for key, asked in config.ranges.items()}


def _make_distributions(optuna: Any, config: SearchConfig) -> dict[str, Any]:
    kinds = optuna.distributions
    space: dict[str, Any] = {
        key: kinds.CategoricalDistribution(list(range(len(values))))
        for key, values in config.choices.items()
    }
    for key, asked in config.ranges.items():
        space[key] = _make_distribution(kinds, asked)
    return space


def _make_distribution(kinds: Any, asked: Range) -> Any:
    if asked.whole:
        step = int(asked.step or 1)
        return kinds.IntDistribution(int(asked.low), int(asked.high), log=asked.log, step=step)
    return kinds.FloatDistribution(asked.low, asked.high, log=asked.log, step=asked.step)


def _make_frozen_trial(
    optuna: Any, past: Observation, space: dict[str, Any], directions: Sequence[Direction]
) -> Any:
    states = optuna.trial.TrialState
    state = {
        "open": states.RUNNING, "ok": states.COMPLETE, "beyond": states.PRUNED,
        "pruned": states.PRUNED, "lost": states.FAIL,
    }[past.state]  # fmt: skip
    return optuna.trial.create_trial(
        state=state,
        params=past.params,
        distributions=space,
        values=past.values if past.state == "ok" else None,
        constraints={**past.excess, **_pruned_constraint(past, directions)} or None,
        intermediate_values=_intermediate_values(past, directions),
        system_attrs=past.notes,
    )


def _intermediate_values(
    past: Observation, directions: Sequence[Direction]
) -> dict[int, float] | None:
    """What TPE ranks pruned trials by: rung by rung, in the sense of the one objective."""
    if past.state != "pruned" or len(directions) > 1:
        return None
    sign = 1 if directions[0] == "minimize" else -1
    return {number: sign * loss for number, loss in enumerate(past.rungs)}


def _pruned_constraint(past: Observation, directions: Sequence[Direction]) -> dict[str, float]:
    """Of several objectives samplers read no intermediate values: there a pruned trial counts as
    worse than any measured one, the less so the further it came."""
    if past.state != "pruned" or len(directions) == 1:
        return {}
    return {"pruned": 1.0 / len(past.rungs)}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
