"""One suggestion of a search, as its history on disk holds it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.spec.search_config import SearchConfig

Params = dict[str, Any]
"""Dotted key -> index into its choices, or a number of its range."""


@dataclass
class Observation:
    """One suggestion that was made.

    ``open`` has no values yet; ``ok`` has; ``beyond`` breaks a limit, has diverged or is not
    possible: above 0 in ``excess``; ``lost`` failed and says nothing; ``pruned`` waits at the
    last of its ``rungs``, which are the validation losses at each that it has reached.
    """

    params: Params
    state: Literal["open", "ok", "beyond", "lost", "pruned"] = "open"
    values: list[float] = field(default_factory=list)
    excess: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # the sampler's own
    rungs: list[float] = field(default_factory=list)


@dataclass
class Suggestion:
    """One suggestion: its patch of the base experiment, its trial if it has one.

    Attributes:
        flops: of its whole training.
        why: it has no trial of its own, if there is a reason.
        training, steps: of its trial.
        kept: a person wants it trained to the end, whatever the rungs say.
    """

    past: Observation
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


# The history of a search on disk, from which it goes on: ``search.json``, written whole.


def save_history(
    path: Path, config: SearchConfig, points: Sequence[Suggestion], seconds: float
) -> None:
    """Writes every suggestion, what became of it, and the time spent."""
    plain = [asdict(point) for point in points]
    write_json(
        path, {"schema": 1, "search": _search_identity(config), "seconds": seconds, "points": plain}
    )


def load_history(path: Path, config: SearchConfig) -> tuple[list[Suggestion], float]:
    """Points and seconds so far; none if the search has not begun.

    Raises:
        StoreError: the history is damaged, or of another search.
    """
    try:
        found = read_json(path)
        if found["search"] != _search_identity(config):
            text = f"{path} is the history of another search of this name"
            raise StoreError(f"{text}; give the sweep another name, or remove that file")
        points = [Suggestion(**{**p, "past": Observation(**p["past"])}) for p in found["points"]]
        return points, float(found["seconds"])
    except FileNotFoundError:
        return [], 0.0
    except (KeyError, TypeError) as error:
        text = f"{path} is damaged ({error})"
        raise StoreError(f"{text}; remove it to search anew, results stay") from None


def _search_identity(config: SearchConfig) -> dict[str, Any]:
    """What suggestions depend on: a longer budget goes on with the same history."""
    asked = config.model_dump(mode="json")
    for budget in ("trials", "flops", "hours", "parallel"):
        del asked[budget]
    return asked
