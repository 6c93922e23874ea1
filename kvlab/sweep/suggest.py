"""Suggestions from Optuna's samplers. The only module that imports optuna.

A study is made anew from the history for every suggestion, with a sampler whose seed follows
from the search's seed and the number of the suggestion. So a suggestion depends on the seed and
the history alone, and a search that was killed goes on as if it had not been.
"""

import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvlab.spec.samplers import SHORT, sampler_parts
from kvlab.spec.search import Range, SearchConfig

Direction = Literal["minimize", "maximize"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "tpe": {"constant_liar": True},
    "nsga2": {"population_size": 20},  # Optuna's 50 would draw most of a small budget by chance
    "nsga3": {"population_size": 20},
    "gp": {"deterministic_objective": True},
}
"""Where ours differ from Optuna's."""

_ONE_SEED = ("qmc", "grid")
"""Their seed shuffles a sequence that is gone through, so it stays."""

_OF_THE_STUDY = "qmc:"
"""How far a sequence has been gone through, which Optuna keeps with the study."""

Params = dict[str, Any]
"""Dotted key -> index into its choices, or a number of its range."""


@dataclass
class Past:
    """One suggestion that was made.

    ``open`` has no values yet; ``ok`` has; ``beyond`` breaks a limit, has diverged or is not
    possible: above 0 in ``excess``; ``lost`` failed and says nothing; ``pruned`` waits at the
    last of its ``rungs``, which are the validation losses at each that it has reached.
    """

    params: Params
    state: Literal["open", "ok", "beyond", "lost", "pruned"] = "open"
    values: list[float] = field(default_factory=list)
    excess: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # the sampler's own
    rungs: list[float] = field(default_factory=list)


def suggest(config: SearchConfig, directions: Sequence[Direction], history: Sequence[Past]) -> Past:
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
            sampler=_sampler(optuna, config, len(history)),
            directions=list(directions),
        )
        number = storage.get_study_id_from_name(study.study_name)
        for key, value in (history[-1].notes if history else {}).items():
            if key.startswith(_OF_THE_STUDY):
                storage.set_study_system_attr(number, key, value)
        space = _space(optuna, config)
        for past in history:
            study.add_trial(_frozen(optuna, past, space, directions))
        trial = study.ask(space)
    kept = storage.get_study_system_attrs(number).items()
    notes = {key: value for key, value in kept if key.startswith(_OF_THE_STUDY)}
    notes |= study.trials[-1].system_attrs
    return Past(dict(trial.params), notes={k: v for k, v in notes.items() if _plain(v)})


def _sampler(optuna: Any, config: SearchConfig, number: int) -> Any:
    name, told = sampler_parts(config.sampler)
    arguments = {**_DEFAULTS.get(name, {}), **told}
    for kind in ("crossover", "mutation"):
        if kind in arguments:
            arguments[kind] = getattr(optuna.samplers.nsgaii, arguments[kind])()
    if name == "grid":
        arguments["search_space"] = _grid(config)
    changing = name not in _ONE_SEED
    arguments["seed"] = (config.seed * 1_000_003 + number * changing) % 2**32
    return getattr(optuna.samplers, SHORT[name])(**arguments)


def _grid(config: SearchConfig) -> dict[str, list[Any]]:
    points: dict[str, list[Any]] = {
        key: list(range(len(values))) for key, values in config.choices.items()
    }
    return points | {key: asked.points() or [] for key, asked in config.ranges.items()}


def _space(optuna: Any, config: SearchConfig) -> dict[str, Any]:
    kinds = optuna.distributions
    space: dict[str, Any] = {
        key: kinds.CategoricalDistribution(list(range(len(values))))
        for key, values in config.choices.items()
    }
    for key, asked in config.ranges.items():
        space[key] = _distribution(kinds, asked)
    return space


def _distribution(kinds: Any, asked: Range) -> Any:
    if asked.whole:
        step = int(asked.step or 1)
        return kinds.IntDistribution(int(asked.low), int(asked.high), log=asked.log, step=step)
    return kinds.FloatDistribution(asked.low, asked.high, log=asked.log, step=asked.step)


def _frozen(optuna: Any, past: Past, space: dict[str, Any], directions: Sequence[Direction]) -> Any:
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
        constraints={**past.excess, **_behind(past, directions)} or None,
        intermediate_values=_intermediate(past, directions),
        system_attrs=past.notes,
    )


def _intermediate(past: Past, directions: Sequence[Direction]) -> dict[int, float] | None:
    """What TPE ranks pruned trials by: rung by rung, in the sense of the one objective."""
    if past.state != "pruned" or len(directions) > 1:
        return None
    sign = 1 if directions[0] == "minimize" else -1
    return {number: sign * loss for number, loss in enumerate(past.rungs)}


def _behind(past: Past, directions: Sequence[Direction]) -> dict[str, float]:
    """Of several objectives samplers read no intermediate values: there a pruned trial counts as
    worse than any measured one, the less so the further it came."""
    if past.state != "pruned" or len(directions) == 1:
        return {}
    return {"pruned": 1.0 / len(past.rungs)}


def _plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
