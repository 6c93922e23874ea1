"""What a driver tells those who watch."""

from dataclasses import dataclass
from typing import Literal

from kvlab.sweep.plan import PlannedTrial


@dataclass(frozen=True)
class Event:
    """Something that people watching would like to know.

    ``seconds`` is how long the trial ran; ``message`` says why it was started again.
    """

    kind: Literal["started", "ended", "retried"]
    planned: PlannedTrial
    status: str = ""
    seconds: float = 0.0
    message: str = ""
