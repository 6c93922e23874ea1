"""The suggestions of a search on disk: ``sweeps/<name>/points/<level>.json``, one sealed file each.

A suggestion is written when it is made and when something becomes of it, so what a search writes
grows with its suggestions. ``sweep.json`` describes the search as it was submitted, and
`add_points` adds the suggestions wherever it is read.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import check_form, read_sealed_json, write_sealed_json
from kvlab.store.record_forms import PointForm

POINTS_FOLDER = "points"

POINT_KEYS = ("level", "patch", "trial", "past", "why", "cell")
"""What a file of a suggestion has; see `kvlab.sweep.search.search_history.Suggestion`. ``cell`` is
its cell as ``sweep.json`` lists cells; None if it has none."""


class SearchPoints:
    """Read and write the suggestions of one search. What is read is kept until a file changes.

    Args:
        directory: of the sweep.
    """

    def __init__(self, directory: Path):
        self._folder = directory / POINTS_FOLDER
        self._read: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}

    def write(self, point: Mapping[str, Any], fence: Fence | None = None) -> None:
        """Write a suggestion, which has the keys `POINT_KEYS`."""
        path = self._folder / f"{point['level']}.json"
        write_sealed_json(path, {"schema": 1, **point}, fence=fence)

    def read(self) -> list[dict[str, Any]]:
        """Return all suggestions in the order in which they were made.

        Raises:
            RecordDamaged: a file is not what was written.
        """
        return [self._read_file(path) for path in list_point_files(self._folder.parent)]

    def _read_file(self, path: Path) -> dict[str, Any]:
        state = path.stat()
        stamp = (state.st_mtime_ns, state.st_ino)
        if self._read.get(path.name, (None, {}))[0] != stamp:
            point = read_sealed_json(path, *POINT_KEYS)
            check_form(path, point, PointForm)
            self._read[path.name] = stamp, point
        return self._read[path.name][1]


def list_point_files(directory: Path) -> list[Path]:
    """Return the files of a sweep's suggestions, in order."""
    try:
        names = os.listdir(directory / POINTS_FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    files = [name for name in names if name.endswith(".json") and not name.startswith(".")]
    paths = (directory / POINTS_FOLDER / name for name in files)
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def add_points(sweep: Mapping[str, Any], points: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the description of a search with its suggestions, their cells and what became of them.

    Args:
        sweep: content of ``sweep.json``.
        points: from `SearchPoints.read`.
    """
    points = list(points)
    [(factor, levels)] = sweep["factors"].items()
    with_cell = [point for point in points if point["cell"] is not None]
    patches = {point["level"]: point["patch"] for point in with_cell}
    return {
        **sweep,
        "factors": {factor: [*levels, *patches]},
        "patches": {factor: {**sweep["patches"][factor], **patches}},
        "cells": [*sweep["cells"], *(point["cell"] for point in with_cell)],
        "search": {**sweep["search"], "suggestions": [_describe(point) for point in points]},
    }


def _describe(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reports read of a suggestion; `kvlab.analysis.search_results` says what it is."""
    past = point["past"]
    return {
        "level": point["level"],
        "settings": point["patch"],
        "trial": "" if point["why"] else point["trial"],
        "state": past["state"],
        "values": past["values"],
        "rungs": past["rungs"],
        "violations": past["excess"],
        "reason": point["why"],
    }
