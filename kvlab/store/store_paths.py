"""Where everything of a store is, and the locks that say who may write it.

The suggestions of a search are one sealed file each, ``sweeps/<name>/points/<level>.json``, written
when a suggestion is made and when something becomes of it: what a search writes grows with its
suggestions. ``sweep.json`` describes the search as it was submitted, and `add_points` adds the
suggestions wherever it is read.
"""

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import RecordDamaged, StoreError, UsageError
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock, seems_held
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.spec.spec_model import NAME_PATTERN, NAME_RULE
from kvlab.store.record_forms import read_record

ID_PATTERN = re.compile(r"[0-9a-f]{16}\Z")


class StorePaths:
    """Paths and locks in a store.

    Attributes:
        path: The folder of the store.
    """

    path: Path

    # Paths

    def trial_directory(self, trial_id: str) -> Path:
        return self.path / "trials" / _check_id(trial_id)

    def training_directory(self, training_id: str) -> Path:
        return self.path / "trainings" / _check_id(training_id)

    def trunk_directory(self, trunk_id: str) -> Path:
        return self.path / "trunks" / _check_id(trunk_id)

    def sweep_directory(self, name: str) -> Path:
        if not re.match(NAME_PATTERN, name) or name.endswith("\n"):
            raise UsageError(f"sweep = {name!r} is not a name; {NAME_RULE}")
        return self.path / "sweeps" / name

    def stop_flag(self, name: str) -> Path:
        """Return the file whose presence asks all trials of a sweep to stop."""
        return self.sweep_directory(name) / "stop"

    def new_driver_stop_flag(self, name: str) -> Path:
        """Return a new path for the file that asks the trials of one driver to stop."""
        return self.sweep_directory(name) / "drivers" / f"{secrets.token_hex(8)}.stop"

    # Locks

    def trial_lock(self, trial_id: str) -> Lock:
        return Lock(self.trial_directory(trial_id) / "lock")

    def training_lock(self, training_id: str) -> Lock:
        return Lock(self.training_directory(training_id) / "lock")

    def trunk_lock(self, trunk_id: str) -> Lock:
        return Lock(self.trunk_directory(trunk_id) / "lock")

    def report_lock(self, name: str) -> Lock:
        return Lock(self.sweep_directory(name) / "report")

    def driver_lock(self, name: str) -> Lock:
        """Return a new lock that a driver holds while it runs; a sweep may have several drivers."""
        path = self.sweep_directory(name) / "drivers" / secrets.token_hex(8)
        return Lock(path, remove_on_release=True)

    def held_driver_locks(self, name: str) -> list[Lock]:
        """Return the locks of the drivers that run this sweep now."""
        folder = self.sweep_directory(name) / "drivers"
        drivers = sorted({file.partition(".")[0] for file in list_names(folder)})
        locks = [Lock(folder / driver) for driver in drivers if ID_PATTERN.match(driver)]
        return [lock for lock in locks if seems_held(lock.path)]

    def is_running(self, trial_id: str) -> bool:
        return seems_held(self.trial_directory(trial_id) / "lock")

    def is_driven(self, name: str) -> bool:
        """Return whether a driver runs this sweep now."""
        return bool(self.held_driver_locks(name))


def _check_id(text: str) -> str:
    if not ID_PATTERN.match(text):
        raise UsageError(f"id = {text!r} is not 16 hex digits")
    return text


def list_names(directory: Path) -> list[str]:
    """Return the names in a directory; none if there is no such directory."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        text = f"{directory} cannot be read: {error.strerror}"
        raise StoreError(f"{text}; check its permissions") from None


def list_folders(directory: Path) -> list[Path]:
    """Return the folders in a directory, sorted, without links and hidden ones."""
    paths = [directory / name for name in sorted(list_names(directory)) if name[0] != "."]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


# Suggestions of a search


POINTS_FOLDER = "points"


def format_level(number: int) -> str:
    """Return the level of a suggestion, which are counted from 1."""
    return f"p{number:04d}"


class SearchPoints:
    """Read and write the suggestions of one search.

    Args:
        directory: of the sweep.
    """

    def __init__(self, directory: Path):
        self._folder = directory / POINTS_FOLDER

    def write(self, point: Mapping[str, Any], fence: Fence | None = None) -> None:
        """Write a suggestion, as `kvlab.extensions.search.history.Suggestion` describes itself.

        Its ``cell`` is as ``sweep.json`` lists cells; None if it has none.
        """
        path = self._folder / f"{point['level']}.json"
        write_sealed_json(path, {"schema": 1, **point}, fence=fence)

    def read(self) -> list[dict[str, Any]]:
        """Return all suggestions in the order in which they were made.

        Raises:
            RecordDamaged: a file is missing, or not what was written.
        """
        points = []
        for number in range(1, len(list_point_files(self._folder.parent)) + 1):
            path = self._folder / f"{format_level(number)}.json"
            try:
                points.append(read_record(path))
            except FileNotFoundError:
                raise RecordDamaged(f"{path} is missing") from None
        return points


def list_point_files(directory: Path) -> list[Path]:
    """Return the files of a sweep's suggestions, in order."""
    folder = directory / POINTS_FOLDER
    names = [name for name in list_names(folder) if name.endswith(".json") and name[0] != "."]
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


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
    # what `kvlab.analysis.search_results` reads of a suggestion
    suggestions = [
        {
            "level": point["level"],
            "settings": point["patch"],
            "trial": "" if point["why"] else point["trial"],
            **{key: point["past"][key] for key in ("state", "values", "rungs")},
            "violations": point["past"]["excess"],
            "reason": point["why"],
        }
        for point in points
    ]
    return {
        **sweep,
        "factors": {factor: [*levels, *patches]},
        "patches": {factor: {**sweep["patches"][factor], **patches}},
        "cells": [*sweep["cells"], *(point["cell"] for point in with_cell)],
        "search": {**sweep["search"], "suggestions": suggestions},
    }
