"""The numbers that a search may look for or keep within limits."""

from collections.abc import Mapping

from kvlab.errors import SpecError
from kvlab.spec.search_config import Limit
from kvlab.spec.sweep import Sweep
from kvlab.spec.yaml_reader import Key
from kvlab.store.metrics import METRICS
from kvlab.sweep.planning.planner import PlannedTrial
from kvlab.sweep.search.optuna_sampler import Direction

PLANNED_METRICS = ("parameters", "kv_bytes", "kv_bytes_per_token", "training_flops")
"""Numbers that are known before a trial runs; less is better."""


def check_objectives(sweep: Sweep) -> None:
    """Raises SpecError unless every objective and limit is a number that can be had."""
    search = sweep.search
    assert search is not None, "only for sweeps with a search"
    problems = []
    names: list[tuple[tuple[Key, ...], str]] = [
        (("search", "objectives", number), name) for number, name in enumerate(search.objectives)
    ]
    names += [(("search", "limits", name), name) for name in search.limits]
    for path, name in names:
        shown = ".".join(map(str, path[:2]))
        if name not in METRICS and name not in PLANNED_METRICS:
            text = f"{shown} names {name}, which is not measured; use one of"
            usable = [
                *PLANNED_METRICS,
                *(m for m, facts in METRICS.items() if facts.better != "neither"),
            ]
            text = f"{text} {', '.join(usable)}"
            problems.append(sweep.source.document.problem(path, text))
        elif path[1] == "objectives" and name in METRICS and METRICS[name].better == "neither":
            text = f"{shown} names {name}, of which neither more nor less is better; use another"
            problems.append(sweep.source.document.problem(path, text))
    if problems:
        raise SpecError(problems)


def objective_direction(objective: str) -> Direction:
    """``minimize`` or ``maximize``."""
    higher = objective in METRICS and METRICS[objective].better == "higher"
    return "maximize" if higher else "minimize"


def planned_metrics(planned: PlannedTrial) -> dict[str, float]:
    """`KNOWN` of one trial."""
    return {
        "parameters": planned.parameters,
        "kv_bytes": planned.kv_bytes,
        "kv_bytes_per_token": planned.kv_bytes_per_token,
        "training_flops": planned.flops,
    }


def limit_violations(limits: Mapping[str, Limit], found: Mapping[str, float]) -> dict[str, float]:
    """By how much each limit is broken, relative to it; 0 or less keeps it."""
    broken = {}
    for name, limit in limits.items():
        if name in found:
            value = float(found[name])
            for bound, sign in ((limit.at_most, 1.0), (limit.at_least, -1.0)):
                if bound is not None:
                    broken[f"{name} {sign:+g}"] = sign * (value - bound) / (abs(bound) or 1.0)
    return broken
