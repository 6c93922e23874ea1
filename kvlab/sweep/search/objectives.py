"""The metrics that a search may optimize or keep within limits."""

from collections.abc import Mapping
from difflib import get_close_matches

from kvlab.errors import SpecError
from kvlab.spec.search_config import Limit
from kvlab.spec.sweep import Sweep
from kvlab.spec.yaml_reader import Key
from kvlab.store.metrics import METRICS
from kvlab.sweep.planning.planner import PlannedTrial
from kvlab.sweep.search.optuna_sampler import Direction

PLANNED_METRICS = ("parameters", "kv_bytes", "kv_bytes_per_token", "training_flops")
"""Metrics that are known before a trial runs; lower is better."""


def check_objectives(sweep: Sweep) -> None:
    """Raise SpecError unless every objective and limit is a metric that is planned or measured."""
    search = sweep.search
    assert search is not None, "only for sweeps with a search"
    problems = []
    fields: list[tuple[tuple[Key, ...], str]] = [
        (("search", "objectives", number), name) for number, name in enumerate(search.objectives)
    ]
    fields += [(("search", "limits", name), name) for name in search.limits]
    for path, name in fields:
        field = ".".join(map(str, path[:2]))
        if name not in METRICS and name not in PLANNED_METRICS:
            usable = [m for m, metric in METRICS.items() if metric.better != "neither"]
            near = get_close_matches(name, [*PLANNED_METRICS, *usable], 1)
            names = ", ".join([*PLANNED_METRICS, *usable])
            hint = f"did you mean {near[0]}?" if near else f"use one of {names}"
            text = f"{field} names {name}, which is not measured; {hint}"
            problems.append(sweep.source.document.problem(path, text))
        elif path[1] == "objectives" and name in METRICS and METRICS[name].better == "neither":
            text = f"{field} names {name}, of which neither more nor less is better; use another"
            problems.append(sweep.source.document.problem(path, text))
    if problems:
        raise SpecError(problems)


def objective_direction(objective: str) -> Direction:
    """Return ``minimize`` or ``maximize``."""
    is_higher_better = objective in METRICS and METRICS[objective].better == "higher"
    return "maximize" if is_higher_better else "minimize"


def planned_metrics(planned: PlannedTrial) -> dict[str, float]:
    """Return the values of `PLANNED_METRICS` for one trial."""
    return {
        "parameters": planned.parameters,
        "kv_bytes": planned.kv_bytes,
        "kv_bytes_per_token": planned.kv_bytes_per_token,
        "training_flops": planned.flops,
    }


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
