"""`sweep.json`: what was asked, frozen as it was submitted, and which trials answer it."""

import hashlib
from typing import Any

from kvlab.sweep.plan import Plan


def sweep_description(
    plan: Plan, *, yaml: str, experiment_yaml: str, command: str
) -> dict[str, Any]:
    """The record of one sweep.

    Args:
        plan: of the sweep.
        yaml: text of the sweep's file.
        experiment_yaml: text of the base experiment's file.
        command: as typed, without absolute paths.
    """
    sweep = plan.sweep
    order = {
        factor: [sweep.baseline[factor], *(n for n in levels if n != sweep.baseline[factor])]
        for factor, levels in sweep.factors.items()
    }
    return {
        "name": sweep.name,
        "question": sweep.question,
        "factors": order,
        "patches": sweep.model_dump(mode="json")["factors"],
        "baseline": dict(sweep.baseline),
        "design": " + ".join(sweep.design_seeds),
        "designed": sweep.selection.designed,
        "rules": [str(rule) for rule in sweep.selection.rules],
        "notes": list(sweep.selection.notes),
        "seeds": list(sweep.all_seeds),
        "report": sweep.report.model_dump(mode="json"),
        "cells": [
            {
                "levels": dict(cell.levels),
                "trials": {str(seed): trial for seed, trial in cell.trials.items()},
                **({"off": sorted(cell.off)} if cell.off else {}),
            }
            for cell in plan.cells
        ],
        "yaml": yaml,
        "yaml_sha256": hashlib.sha256(yaml.encode()).hexdigest(),
        "experiment_yaml": experiment_yaml,
        "command": command,
    }
