"""The record on disk: one directory per trial, with one writer at a time.

    <store>/trainings/<id>/  config.json, start.json, checkpoints/, rungs.json, final/,
                             training.json | diverged.json
    <store>/trunks/<id>/     step-<n>/, checkpoints of a stable phase that token budgets share
    <store>/trials/<id>/     trial.json, progress.json, result.json, items.jsonl.gz,
                             texts.json.gz, tasks.json.gz, partial/<n>.json,
                             attempts/<n>/{log.txt, traceback.txt, repairs.txt, paused}
    <store>/sweeps/<name>/   sweep.json, search.json, points/, reported.json, timings.json, stop,
                             drivers/

Locks lie beside them, as ``lock.<n>`` (`kvlab.fs.lease`).

``result.json`` exists if and only if the trial has ended. Readers ignore names that are not
kvlab's and files that a killed process left unfinished.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kvlab.errors import RecordDamaged, StoreError, UsageError
from kvlab.fs import sealed_files
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.humanize import suggest_name
from kvlab.spec.spec_model import NAME_PATTERN
from kvlab.store.record_forms import SCHEMA, read_if_whole, read_record
from kvlab.store.store_paths import SearchPoints, add_points, list_names
from kvlab.store.timings import TimingSession, read_timings
from kvlab.store.trial_records import TrialRecords

TRAINING_FILES = ("config.json", "start.json", "rungs.json", "diverged.json", "training.json")
"""Files of a training; the last one completes it."""

WEIGHT_FOLDERS = ("checkpoints", "final")

_TRUNK_STEP = re.compile(r"step-[0-9]{8,}\Z")


class Store(TrialRecords):
    """Read and write the record under ``path``. Constructing a store touches nothing on disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            text = f"{path} is a file, and a store is a folder"
            hint = "`kvlab copy --from` unpacks the record of a sweep into one"
            raise UsageError(f"{text}; name another with --store, or {hint}")
        self._ends = {}

    # Trainings

    def is_trained(self, training_id: str) -> bool:
        """Return whether a training is done and its final weights are there.

        Its record is checked; of the weights only the size is, since whoever loads them checks
        what they contain.
        """
        directory = self.training_directory(training_id)
        paths = (directory / "training.json", directory / "final" / "model.safetensors")
        return all(path.exists() for path in paths) and self.check_training(training_id) is None

    def check_training(self, training_id: str, *, contents: bool = False) -> str | None:
        """Return what is wrong with the files of a training that has ended.

        Args:
            contents: read the weights; otherwise only their size is compared.

        Returns:
            None if nothing is, or if it has not ended. Weights that are gone are no damage.
        """
        directory = self.training_directory(training_id)
        try:
            for name, seal in read_record(directory / "training.json")["files"].items():
                is_weights = not name.endswith(".json")
                if is_weights and not os.path.lexists(directory / name):
                    continue  # garbage collection removes weights that have been measured
                sealed_files.check_file(directory / name, seal, contents=contents or not is_weights)
        except FileNotFoundError:
            return None
        except RecordDamaged as error:
            return str(error)
        return None

    def earlier_training_record(self, training_id: str) -> bytes | None:
        """Return the whole record of a training whose weights are gone; None if there is none.

        It is where it was written, or where a heal has moved it.
        """
        directory = self.training_directory(training_id)
        aside = sorted((directory / "damaged").glob("[0-9]*"), key=lambda one: (len(one.name), one))
        for folder in (directory, *reversed(aside)):
            with contextlib.suppress(FileNotFoundError, RecordDamaged):
                read_record(folder / "training.json")
                return sealed_files.read_sealed_bytes(folder / "training.json")
        return None

    def training_seal(self, training_id: str) -> str | None:
        """Return the sha256 of a finished training's record; None if it has none."""
        try:
            return sealed_files.read_seal(self.training_directory(training_id) / "training.json")
        except FileNotFoundError:
            return None

    def divergence(self, training_id: str) -> str | None:
        """Return the message of a training that diverged, None if it has not.

        A damaged record is None, too: the training is run again.
        """
        path = self.training_directory(training_id) / "diverged.json"
        return read_if_whole(path).get("message")

    def write_divergence(
        self, training_id: str, message: str, code: Sequence[str], fence: Fence | None = None
    ) -> None:
        path = self.training_directory(training_id) / "diverged.json"
        content = {"schema": SCHEMA, "message": message, "code": list(code)}
        write_sealed_json(path, content, fence=fence)

    def training_code(self, training_id: str) -> list[str]:
        """Return the digests of the code that a training's weights come from so far.

        Returns:
            See `kvlab.train.training_record.TrainingRecord`; none if it has not begun.
        """
        directory = self.training_directory(training_id)
        if self.is_trained(training_id):
            return _read_code(directory / "training.json")
        if self.divergence(training_id) is not None:
            return _read_code(directory / "diverged.json")
        names = sorted(list_names(directory / "checkpoints"), reverse=True)
        steps = [directory / "checkpoints" / name for name in names if _TRUNK_STEP.match(name)]
        return _read_code(steps[0] / "state.json") if steps else []

    def trunk_code(self, trunk_id: str, last_step: int | None = None) -> list[str]:
        """Return the digests of the code of a trunk's newest checkpoint, at most ``last_step``."""
        steps = [step for step in self.trunk_steps(trunk_id) if step <= (last_step or step)]
        directory = self.trunk_directory(trunk_id)
        return _read_code(directory / f"step-{steps[-1]:08d}" / "state.json") if steps else []

    def set_aside_code(self, directory: Path, fence: Fence) -> Path:
        """Move what a training or a trunk has so far into ``other-code/``, so that it runs again.

        Requires its lock.

        Returns:
            The folder that it is moved to.
        """
        steps = [name for name in list_names(directory) if _TRUNK_STEP.match(name)]
        names = (*reversed(TRAINING_FILES), *WEIGHT_FOLDERS, *steps)
        return sealed_files.set_aside(directory, names, fence, "other-code")

    def rungs(self, training_id: str) -> dict[int, float]:
        """Return validation losses (nats/token) by the steps after which a search paused it."""
        path = self.training_directory(training_id) / "rungs.json"
        rungs = read_if_whole(path).get("rungs", {})  # damaged ones are measured again
        return {int(step): float(rung["loss"]) for step, rung in rungs.items()}

    def trunk_steps(self, trunk_id: str) -> list[int]:
        """Return the steps after which a trunk has a checkpoint, sorted; see `kvlab.train`."""
        names = list_names(self.trunk_directory(trunk_id))
        return sorted(int(name[5:]) for name in names if _TRUNK_STEP.match(name))

    # Sweeps

    def sweep_names(self) -> list[str]:
        return sorted(
            name
            for name in list_names(self.path / "sweeps")
            if re.match(NAME_PATTERN, name)
            and (self.path / "sweeps" / name / "sweep.json").exists()
        )

    def sweep(self, name: str) -> dict[str, Any]:
        """Return a sweep's description: the question, its factors, its cells and their trials.

        That of a search has the suggestions so far, each with its level and its cell.

        Raises:
            UsageError: no such sweep was submitted to this store.
            RecordDamaged: the description is not what was written.
        """
        path = self.sweep_directory(name) / "sweep.json"
        try:
            sweep = read_record(path)
            points = self.search_points(name).read() if "search" in sweep else []
            if not points:
                return sweep
            with contextlib.suppress(FileNotFoundError):
                spent = read_record(path.with_name("search.json"))
                facts = {"spent_seconds": spent["seconds"], "spent_flops": spent["flops"]}
                sweep = {**sweep, "search": {**sweep["search"], **facts}}
            return add_points(sweep, points)
        except RecordDamaged as error:
            hint = "submit the sweep again, which writes it anew"
            raise RecordDamaged(f"{error}; {hint}") from None
        except FileNotFoundError:
            names = self.sweep_names()
            text = f"sweep = {name} is not in the store {self.path}"
            text = f"{text} ({', '.join(names) or 'it has none yet'})"
            hint = suggest_name(name, names, "submit it first, or name another store")
            raise UsageError(f"{text}; {hint}") from None

    def search_points(self, name: str) -> SearchPoints:
        """Return the suggestions of a search."""
        return SearchPoints(self.sweep_directory(name))

    def write_sweep(self, description: dict[str, Any]) -> None:
        path = self.sweep_directory(description["name"]) / "sweep.json"
        write_sealed_json(path, {"schema": SCHEMA, **description})

    def note_report(self, name: str, seeds: Iterable[int]) -> None:
        """Note that a report has shown what these seeds decide, for as far as this can be written.

        Seeds that are added later are recognized by it.
        """
        reported, new = self.reported_seeds(name), sorted(seeds)
        path = self.sweep_directory(name) / "reported.json"
        with contextlib.suppress(OSError, StoreError):  # a store that others may only read
            if new not in reported and (reported or not os.path.lexists(path)):  # not over damage
                write_sealed_json(path, {"schema": SCHEMA, "seeds": [*reported, new]})

    def reported_seeds(self, name: str) -> list[list[int]]:
        """Return the sets of seeds at which reports were written."""
        # `kvlab verify` tells of damaged ones
        return list(read_if_whole(self.sweep_directory(name) / "reported.json").get("seeds", ()))

    def timings(self, name: str) -> dict[str, TimingSession]:
        """Return, by trial, the session in which a trial of this sweep was timed again."""
        timed = [one for one in read_timings(self.sweep_directory(name)) if not one.failure]
        return {trial: session for session in timed for trial in session.trials}

    def sweep_trials(self, name: str) -> list[str]:
        """Return the trial ids of a sweep, each once, cell by cell."""
        cells = list_cells(self.sweep(name))
        return list(dict.fromkeys(trial for cell in cells for trial in cell["trials"].values()))

    def results(self, name: str) -> Iterator[dict[str, Any]]:
        """Iterate over the readable results of a sweep."""
        timings = self.timings(name)
        for trial_id in self.sweep_trials(name):
            with contextlib.suppress(RecordDamaged):  # see `status`
                result = self.result(trial_id, timings)
                if result is not None:
                    yield result


def _read_code(path: Path) -> list[str]:
    """Return the ``code`` of a training's file, which an earlier version did not write."""
    content = read_if_whole(path)
    return list(content.get("state", content).get("code", [""]))


def list_cells(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a sweep's description, first those in which settings were found.

    Args:
        sweep: The content of ``sweep.json``.

    Returns:
        For each cell its levels and its trials by seed. A setting is one more level.
    """
    return [*chain(*find_preparing_cells(sweep).values()), *sweep["cells"]]


def find_preparing_cells(sweep: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the cells in which settings of the design were found, by the key that keeps them."""
    kept = {key: one for key, one in sweep.items() if isinstance(one, dict)}
    return {key: one["cells"] for key, one in kept.items() if "cells" in one}
