"""In which order trials are started.

The baseline first; then one trial of every distinct architecture, so that a broken one is known
in the first minutes; then a fixed shuffle, so that what has ended at any time says something
about the whole design. Ids are hashes: their order is a shuffle, and the same everywhere.
"""

import json
from collections.abc import Sequence

from kvlab.layout import KVLayout
from kvlab.sweep.plan import PlannedTrial


def run_order(trials: Sequence[PlannedTrial]) -> list[PlannedTrial]:
    """``trials``, which are in the design's order, as they are to be started.

    The trial that the plan counts as the trainer of some weights comes before those that share
    them.
    """
    early: dict[str, PlannedTrial] = {}
    for planned in trials:
        early.setdefault(architecture(planned), planned)
    first = {planned.trial.id for planned in early.values()}
    rest = [planned for planned in trials if planned.trial.id not in first]
    shuffled = [*early.values(), *sorted(rest, key=lambda planned: planned.trial.id)]
    leaders: dict[str, PlannedTrial] = {}
    for planned in trials:
        leaders.setdefault(planned.trial.training_id, planned)
    ordered: dict[str, PlannedTrial] = {}
    for planned in shuffled:
        leader = leaders[planned.trial.training_id]
        ordered.setdefault(leader.trial.id, leader)
        ordered.setdefault(planned.trial.id, planned)
    return list(ordered.values())


def architecture(planned: PlannedTrial) -> str:
    """What is built and how it is served; not the recipe, the seed or the text."""
    experiment = planned.trial.experiment
    layout = KVLayout.of(experiment.model, experiment.serving)
    served = [layout.owners, layout.writers, layout.kv_dtype]
    return json.dumps([experiment.model.computation(), served], sort_keys=True)
