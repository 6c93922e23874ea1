"""The contract of what gives a driver more trials while it runs: a search."""

from typing import Protocol

from kvlab.sweep.plan import PlannedTrial


class Feed(Protocol):
    """Asked for trials and told how they end, by the driver's thread alone.

    Attributes:
        ended_because: why there will be no more; empty as long as there may.
    """

    ended_because: str

    def next(self) -> PlannedTrial | None:
        """One more trial, which may have ended before; None if there is none for now."""
        ...

    def ended(self, planned: PlannedTrial, status: str) -> None:
        """Takes how one of its trials ended; those that are not its own are passed over."""
        ...

    def paused(self, planned: PlannedTrial) -> PlannedTrial | None:
        """Takes that one has reached the step at which it was to pause.

        Returns:
            The trial with its next ``until``, to go on; None if it is pruned for now. `next` may
            give it again.
        """
        ...
