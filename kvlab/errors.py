"""Every exception that a user of kvlab can see.

KvlabError                 the root; the CLI prints its text, no traceback, and exits with 1
├── SpecError              what a person wrote is wrong (also a ValueError); the CLI exits with 2
├── UsageError             an argument of a command is wrong (also a ValueError); exits with 2
├── DataError              text, tokens or an evaluation set is missing or not what it should be
├── PretrainedError        a published checkpoint cannot be had, read or written (also a ValueError)
├── StoreError             the store cannot be read or written, or a record in it is damaged
├── ResourceError          a trial asks for more than the machine or the cluster has
├── ClusterLost            the Ray cluster under a running sweep is gone; submit again
├── CacheError             the KV cache was asked for something that its layout cannot do
├── MeasurementError       two measurements that must agree do not: a bug, never a result
├── TrackingError          MLflow cannot be reached or refuses; training goes on
├── CopyError              object storage cannot be reached or refuses; training goes on
│   └── CopyDamaged        what lies there is not what was copied
└── TrialError             one trial ended without a result
    ├── Diverged           the loss became NaN or infinite: a finding
    ├── SourceMissing      the weights that it starts from are not there, or none fits
    ├── Paused             it reached the rung of a search at which it was to pause
    ├── WorkerLost         a process of it died; it goes on from its last checkpoint
    ├── LeaseLost          another process has taken it over
    └── Stopped            asked to stop; a checkpoint is there to go on from
"""

from dataclasses import dataclass


class KvlabError(Exception):
    """Root of kvlab's own errors. ``exit_code`` is what the CLI returns."""

    exit_code = 1


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong: where (1-based; line 0 is a command-line argument), what, the way out."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return " ".join(f"{place}: {self.message}".splitlines())  # a value may hold line ends


class SpecError(KvlabError, ValueError):
    """What a person wrote is wrong. ``problems`` holds every one found, sorted by place."""

    exit_code = 2

    def __init__(self, problems: "list[Problem] | str"):
        self.problems = [] if isinstance(problems, str) else sorted(set(problems))
        super().__init__(
            problems if isinstance(problems, str) else "\n".join(map(str, self.problems))
        )

    def __reduce__(self) -> tuple[type, tuple[object]]:
        return type(self), (self.problems or str(self),)


class UsageError(KvlabError, ValueError):
    """A command-line argument is wrong."""

    exit_code = 2


class DataError(KvlabError):
    """Text, tokens or an evaluation set is missing or not what it should be."""


class PretrainedError(KvlabError, ValueError):
    """A checkpoint cannot be had or read as one of our models, or a model has no published form."""

    exit_code = 2


class StoreError(KvlabError):
    """The store cannot be read or written, or a record in it is damaged."""


class ResourceError(KvlabError):
    """A trial asks for more than the machine or the cluster has."""

    exit_code = 2


class ClusterLost(KvlabError):
    """The Ray cluster under a running sweep is gone, and there is no way back into it."""


class CacheError(KvlabError, ValueError):
    """The KV cache was asked for something that its layout cannot do."""


class MeasurementError(KvlabError):
    """Two measurements that must agree do not."""


class TrackingError(KvlabError):
    """MLflow cannot be reached or refuses."""


class CopyError(KvlabError):
    """Object storage cannot be reached or refuses."""


class CopyDamaged(CopyError):
    """What lies in object storage is not what was copied there."""


class TrialError(KvlabError):
    """One trial ended without a result."""


class Diverged(TrialError):
    """The training loss became NaN or infinite."""


class SourceMissing(TrialError):
    """The weights that a training starts from are not there, or none of them fits."""


class Paused(TrialError):
    """The training reached a rung; a checkpoint and the loss there are written."""


class WorkerLost(TrialError):
    """A process of a trial died under it: started again, it goes on from its last checkpoint."""


class LeaseLost(TrialError):
    """This process was silent for so long that another has taken over what it held."""


class Stopped(TrialError):
    """The trial was asked to stop; it goes on from its last checkpoint."""
