"""Failure classes: why a trial has no measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvlab.errors import DataError, Diverged, PretrainedError, ResourceError, SourceMissing
from kvlab.oom import classify_oom
from kvlab.store.provenance import redact_paths

FailureClass = Literal[
    "bug", "diverged", "device_memory", "host_memory", "data", "resources", "source", "killed"
]
"""``device_memory`` and ``host_memory``: it ran out. ``source``: the weights that the training
starts from are unavailable or do not fit."""

OUT_OF_MEMORY: tuple[FailureClass, ...] = ("device_memory", "host_memory")


@dataclass(frozen=True)
class Failure:
    """One failure, as the record keeps it; ``traceback`` is relative to the trial's directory."""

    kind: FailureClass
    type: str
    message: str
    traceback: str | None = None

    @classmethod
    def from_error(cls, error: BaseException, traceback: str | None = None) -> "Failure":
        message = redact_paths(str(error))
        return cls(classify_error(error), type(error).__name__, message, traceback)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Failure":
        return cls(data["class"], data["type"], data["message"], data["traceback"])

    def as_dict(self) -> dict[str, str | None]:
        """Return the ``error`` of a result."""
        return {
            "class": self.kind,
            "type": self.type,
            "message": self.message,
            "traceback": self.traceback,
        }


def classify_error(error: BaseException) -> FailureClass:
    """Return the class of an error that ended a trial; an unknown one is a bug."""
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, ResourceError):
        return "resources"
    if isinstance(error, SourceMissing | PretrainedError):
        return "source"
    match classify_oom(error):
        case "device":
            return "device_memory"
        case "host":
            return "host_memory"
    return "bug"
