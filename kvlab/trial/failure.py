"""Failure classes: why a trial has no measurements."""

from dataclasses import dataclass
from typing import Literal

from kvlab.errors import DataError, Diverged, PretrainedError, ResourceError, SourceMissing
from kvlab.trial.origin import neutral_text

FailureClass = Literal["bug", "diverged", "out_of_memory", "data", "resources", "source", "killed"]
"""``source``: the weights that the training starts from cannot be had or do not fit."""

# By name, so that classifying needs neither torch nor ray.
_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Failure:
    """One failure, as the record keeps it; ``traceback`` is relative to the trial's directory."""

    kind: FailureClass
    type: str
    message: str
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, traceback: str | None = None) -> "Failure":
        return cls(classify(error), type(error).__name__, neutral_text(str(error)), traceback)

    def as_dict(self) -> dict[str, str | None]:
        return {
            "class": self.kind,
            "type": self.type,
            "message": self.message,
            "traceback": self.traceback,
        }


def classify(error: BaseException) -> FailureClass:
    """The class of an error that ended a trial; what is not known is a bug."""
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, ResourceError):
        return "resources"
    if isinstance(error, SourceMissing | PretrainedError):
        return "source"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _OUT_OF_MEMORY or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return "out_of_memory"
    return "bug"
