"""What `kvlab submit` does before the first trial: texts made ready, architectures tested."""

import argparse
import json
from collections.abc import Callable

from kvlab.cli.live import Live
from kvlab.errors import UsageError
from kvlab.sweep import Plan, PlannedTrial
from kvlab.sweep.budget import budget
from kvlab.sweep.events import Before
from kvlab.sweep.executor import Executor
from kvlab.sweep.memory import MachineMemory, check_memory, this_memory
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
        ResourceError: a training cannot fit the memory of any machine.
        UsageError: a search shares GPUs by memory, which is measured before its trials are known.
    """
    packed = any(one.trial.experiment.resources.gpus == "auto" for one in planned.trials)
    if packed and planned.sweep.search is not None:
        text = "resources.gpus = auto is measured before trials start, and a search finds its"
        raise UsageError(f"{text} trials as it goes; write a number, such as 0.5")
    smoke = Smoke(store, planned.sweep.name, executor, origin, live.say, options.smoke)

    def prepare(missing: list[PlannedTrial], check_stop: Callable[[], None]) -> list[PlannedTrial]:
        for line in check_memory(missing, _machines(options, executor), _alone(options, planned)):
            live.say(line)
        if not options.address:  # a cluster's machines have data folders of their own
            prefetch(missing, live.note, check_stop)
        live.prepared()
        costs = budget(planned, store)
        smoke.rate = costs.rate.flops_per_second if costs and costs.rate else None
        return smoke(missing, check_stop)

    return prepare


def _machines(options: argparse.Namespace, executor: Executor) -> list[MachineMemory]:
    """The memory of the machines that trials may run on; of those that answer."""
    answers = [this_memory()]
    if options.address:
        found = executor.on_every_machine(this_memory, "").values()
        answers = [answer for answer in found if isinstance(answer, str)]
    return [MachineMemory(**json.loads(answer)) for answer in answers]


def _alone(options: argparse.Namespace, planned: Plan) -> bool:
    """Whether one trial runs at a time; the base of a search always does."""
    return options.executor == "inline" or planned.sweep.search is not None
