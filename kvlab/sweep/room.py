"""Room for trials: what can never be met is refused, and what waits for room says so."""

from collections.abc import Callable

from kvlab.errors import ResourceError
from kvlab.spec.parts import ResourcesConfig
from kvlab.sweep.events import Event
from kvlab.sweep.executor import Executor
from kvlab.sweep.plan import PlannedTrial


class Room:
    """What one driver has asked its executor for.

    Args:
        executor: where the trials run.
        tell: takes events for those who watch.
    """

    def __init__(self, executor: Executor, tell: Callable[[Event], None]):
        self._executor, self._tell = executor, tell
        self._checked: set[ResourcesConfig] = set()
        self._told: set[ResourcesConfig] = set()

    def check(self, *planned: PlannedTrial) -> None:
        """Raises ResourceError if one asks for more than there is; each request is asked once."""
        asked = {one.trial.experiment.resources for one in planned} - self._checked
        self._executor.check(asked)
        self._checked |= asked

    def tell_waiting(self, planned: PlannedTrial) -> None:
        """Tells once of each request that nothing runs and there still is no room for it, as
        where a machine has left the cluster."""
        resources = planned.trial.experiment.resources
        if resources in self._told:
            return
        self._told.add(resources)
        try:
            self._executor.check({resources})
            text = "others have what it asks for; it starts when there is room"
        except ResourceError as error:
            text = f"{error}; it starts should one come"
        self._tell(Event("waiting", planned, message=text))
