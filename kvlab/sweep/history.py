"""The history of a search on disk, from which it goes on: ``search.json``, written whole."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError
from kvlab.files import read_json, write_json
from kvlab.spec.search import SearchConfig
from kvlab.sweep.point import Point
from kvlab.sweep.suggest import Past


def save_history(path: Path, config: SearchConfig, points: Sequence[Point], seconds: float) -> None:
    """Writes every suggestion, what became of it, and the time spent."""
    plain = [asdict(point) for point in points]
    write_json(path, {"schema": 1, "search": _asked(config), "seconds": seconds, "points": plain})


def load_history(path: Path, config: SearchConfig) -> tuple[list[Point], float]:
    """Points and seconds so far; none if the search has not begun.

    Raises:
        StoreError: the history is damaged, or of another search.
    """
    try:
        found = read_json(path)
        if found["search"] != _asked(config):
            text = f"{path} is the history of another search of this name"
            raise StoreError(f"{text}; give the sweep another name, or remove that file")
        points = [Point(**{**p, "past": Past(**p["past"])}) for p in found["points"]]
        return points, float(found["seconds"])
    except FileNotFoundError:
        return [], 0.0
    except (KeyError, TypeError) as error:
        text = f"{path} is damaged ({error})"
        raise StoreError(f"{text}; remove it to search anew, results stay") from None


def _asked(config: SearchConfig) -> dict[str, Any]:
    """What suggestions depend on: a longer budget goes on with the same history."""
    asked = config.model_dump(mode="json")
    for budget in ("trials", "flops", "hours", "parallel"):
        del asked[budget]
    return asked
