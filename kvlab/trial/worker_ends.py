"""Why workers that train together ended: each writes down the error that ends it.

What the trainer says is not enough: when one worker is killed, the next one's connection breaks,
and whichever the trainer sees first is what it tells.
"""

from pathlib import Path

from kvlab import errors
from kvlab.errors import KvlabError, WorkerLost
from kvlab.files import read_json, write_json

_OURS, _PEER, _OTHER = "ours", "peer", "other"
_BROKEN = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""What gloo says, as a plain RuntimeError, when another worker is gone."""


def write_beginning(folder: Path, rank: int) -> None:
    """Says that worker ``rank`` runs: what ends it from now on ends a training."""
    (folder / f"{rank}-began").touch()


def write_end(folder: Path, rank: int, error: Exception) -> None:
    """Writes down what ended worker ``rank``, before the trainer hears of it and ends the rest."""
    facts = {"kind": _kind(error), "error": type(error).__name__, "text": str(error)}
    write_json(folder / f"{rank}-end.json", facts)


def _kind(error: Exception) -> str:
    if isinstance(error, KvlabError):
        return _OURS
    from torch.distributed import DistError

    lost = isinstance(error, DistError) or any(text in str(error) for text in _BROKEN)
    return _PEER if lost else _OTHER


def why_ended(folder: Path) -> KvlabError | None:
    """The first worker's error of ours, as the exception that it was; else, if workers began and
    none has a reason of its own, `WorkerLost`; None: it is as the trainer says."""
    found = [read_json(path) for path in sorted(folder.glob("*-end.json"))]
    for facts in found:
        if facts["kind"] == _OURS:
            kind: type[KvlabError] = getattr(errors, facts["error"])
            return kind(facts["text"])
    if any(facts["kind"] == _OTHER for facts in found) or not any(folder.glob("*-began")):
        return None
    return WorkerLost("a process of its training died")
