"""One suggestion of a search, as its history on disk holds it."""

from dataclasses import dataclass
from typing import Any

from kvlab.sweep.suggest import Past


@dataclass
class Point:
    """One suggestion: its patch of the base experiment, its trial if it has one.

    Attributes:
        flops: of its whole training.
        why: it has no trial of its own, if there is a reason.
        training, steps: of its trial.
        kept: a person wants it trained to the end, whatever the rungs say.
    """

    past: Past
    level: str
    patch: dict[str, Any]
    trial: str = ""
    flops: int = 0
    why: str = ""
    training: str = ""
    steps: int = 0
    kept: bool = False

    @property
    def trained(self) -> bool:
        return bool(self.trial) and not self.why
