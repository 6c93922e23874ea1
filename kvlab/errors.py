"""Every exception that a user of kvlab can see.

KvlabError                 the root; the CLI prints its text, no traceback, and exits with 1
├── SpecError              a spec file is wrong (also a ValueError); the CLI exits with 2
├── UsageError             an argument of a command is wrong (also a ValueError); exits with 2
├── DataError              text, tokens or an evaluation set is missing or damaged
│   └── DatasetDamaged     prepared tokens are not what was written; they are prepared again
├── PretrainedError        a published checkpoint cannot be read or written (also a ValueError)
├── StoreError             the store cannot be read or written
│   └── RecordDamaged      a file of the record is not what was written
├── ResourceError          a trial requests more than the machine or the cluster has
├── CodeChanged            a worker runs other code than the driver; submit again
├── ClusterLost            the Ray cluster under a running sweep is gone; submit again
├── CacheError             a request that the KV cache's layout does not support
├── MeasurementError       two measurements that must agree differ: a bug, never a result
├── TrackingError          MLflow is unreachable or rejects a request; training continues
├── CopyError              object storage is unreachable or rejects a request; training continues
│   └── CopyDamaged        a file there is not what was copied
└── TrialError             one trial ended without a result
    ├── Diverged           the loss became NaN or infinite: a finding
    ├── SourceMissing      its initial weights are missing, or none of them fits
    │   └── SourceDamaged  they are not what was written; they are made again
    ├── Paused             it reached the rung of a search at which it pauses
    ├── WorkerKilled       one of its processes died; it resumes from its last checkpoint
    ├── LeaseLost          another process has taken it over
    └── Stopped            it was asked to stop, and wrote a checkpoint to resume from
"""

from dataclasses import dataclass

from kvlab.humanize import sanitize_text


class KvlabError(Exception):
    """Root of kvlab's own errors. ``exit_code`` is what the CLI returns."""

    exit_code = 1


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a file: its location, what is wrong, and a hint.

    Line and column count from 1. Line 0 means a command-line argument.
    """

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return " ".join(f"{location}: {self.message}".splitlines())  # values may contain line ends


class SpecError(KvlabError, ValueError):
    """A spec is wrong. ``problems`` holds all mistakes found, sorted by location."""

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
    """Text, tokens or an evaluation set is missing or damaged.

    Args:
        field: Dotted key of the spec that is at fault, such as ``data.paths.0``; None if none is.
    """

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class DatasetDamaged(DataError):
    """Prepared tokens are not what was written."""


class PretrainedError(KvlabError, ValueError):
    """A checkpoint is unavailable or not a supported model, or a model has no published format."""

    exit_code = 2


class StoreError(KvlabError):
    """The store cannot be read or written."""


class RecordDamaged(StoreError):
    """A file of the record is not what was written.

    The message may quote the file, so its hidden characters are replaced: see `humanize`.
    """

    def __init__(self, message: str):
        super().__init__(sanitize_text(message))


class CodeChanged(KvlabError):
    """A worker runs other code than the driver that started it."""


class ResourceError(KvlabError):
    """A trial requests more than the machine or the cluster has."""

    exit_code = 2


class ClusterLost(KvlabError):
    """The Ray cluster under a running sweep is gone; this process cannot reconnect."""


class CacheError(KvlabError, ValueError):
    """A request that the KV cache's layout does not support."""


class MeasurementError(KvlabError):
    """Two measurements that must agree differ."""


class TrackingError(KvlabError):
    """MLflow is unreachable or rejects a request."""


class CopyError(KvlabError):
    """Object storage is unreachable or rejects a request."""


class CopyDamaged(CopyError):
    """A file in object storage is not what was copied there."""


class TrialError(KvlabError):
    """One trial ended without a result."""


class Diverged(TrialError):
    """The training loss became NaN or infinite."""


class SourceMissing(TrialError):
    """The initial weights of a training are missing, or none of them fits."""


class SourceDamaged(SourceMissing):
    """The weights of the training that another one starts from are damaged or gone."""


class Paused(TrialError):
    """The training reached a rung of a search, and wrote a checkpoint and its loss there."""


class WorkerKilled(TrialError):
    """A process of a trial died; started again, the trial resumes from its last checkpoint."""


class LeaseLost(TrialError):
    """This process was silent for too long, and another has taken over its lock."""


class Stopped(TrialError):
    """The trial was asked to stop; it resumes from its last checkpoint."""
