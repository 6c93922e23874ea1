"""What `kvlab submit` does before the first trial: texts made ready, architectures tested."""

import argparse
from collections.abc import Callable

from kvlab.cli.live import Live
from kvlab.errors import UsageError
from kvlab.sweep import Plan, PlannedTrial
from kvlab.sweep.budget import budget
from kvlab.sweep.events import Before
from kvlab.sweep.executor import Executor
from kvlab.sweep.prefetch import prefetch
from kvlab.sweep.smoke import Smoke
from kvlab.trial.origin import Origin
from kvlab.trial.record import Store


def before(
    options: argparse.Namespace,
    planned: Plan,
    store: Store,
    executor: Executor,
    origin: Origin,
    live: Live,
) -> Before:
    """The driver's preparation, as the options say.

    Raises:
        UsageError: a search shares GPUs by memory, which is measured before its trials are known.
    """
    packed = any(one.trial.experiment.resources.gpus == "auto" for one in planned.trials)
    if packed and planned.sweep.search is not None:
        text = "resources.gpus = auto is measured before trials start, and a search finds its"
        raise UsageError(f"{text} trials as it goes; write a number, such as 0.5")
    smoke = Smoke(store, planned.sweep.name, executor, origin, live.say, options.smoke)

    def prepare(missing: list[PlannedTrial], check_stop: Callable[[], None]) -> list[PlannedTrial]:
        if not options.address:  # a cluster's machines have data folders of their own
            prefetch(missing, live.note, check_stop)
        live.prepared()
        costs = budget(planned, store)
        smoke.rate = costs.rate.flops_per_second if costs and costs.rate else None
        return smoke(missing, check_stop)

    return prepare
