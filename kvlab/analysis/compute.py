"""What a sweep has computed, from its record: training FLOPs and device hours.

Trainings that trials share count once, also those that another sweep has made, and steps that a
training has branched from another token budget's count where they were taken. The hours of a trial
are those of its optimizer steps over all attempts, and of everything else in its last attempt:
data, validation, evaluation and benchmarks. What earlier attempts lost is not recorded.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow, read_rows
from kvlab.spec import ResourcesConfig
from kvlab.store.store import find_preparing_cells


@dataclass(frozen=True)
class Compute:
    """What some trials have computed together.

    Attributes:
        trials: Trials that have ended, each once.
        trainings: Trainings that have ended, each once.
        flops: Of the trainings; those that were pruned up to there.
        hours: By device, ``GPU`` or ``CPU core``.
        compile_seconds: For which trainings waited for `torch.compile`.
        without_flops: Trials whose training failed or diverged, which does not say its FLOPs.
        without_hours: Trials that were pruned, which does not say their hours.
        absent: Trials without a readable result.
    """

    trials: int
    trainings: int
    flops: float
    hours: Mapping[str, float]
    compile_seconds: float
    without_flops: int
    without_hours: int
    absent: int


def measure_compute(study: Study) -> tuple[Compute, dict[str, Compute]]:
    """Return what a sweep has computed in all, and the parts of it that found settings."""
    parts = {
        name: read_rows(study.store, {**study.sweep, "cells": cells})
        for name, cells in find_preparing_cells(study.sweep).items()
    }
    total = _add_up([*study.rows, *chain(*parts.values())])
    return total, {name: _add_up(rows) for name, rows in parts.items()}


def _add_up(rows: Iterable[TrialRow]) -> Compute:
    trials = {row.trial: row for row in rows if row.trial}
    ended = [row for row in trials.values() if row.record.get("provenance")]
    ended.sort(key=lambda row: (str(row.record["provenance"]["started"]), row.trial))
    trainings: set[str] = set()
    sessions: dict[tuple[str, str], TrialRow] = {}
    flops: dict[str, float] = {}  # of a training that several have used, what the longest took
    compile_seconds, seconds = 0.0, defaultdict[str, float](float)
    for row in ended:
        is_first = row.training not in trainings  # the others have waited for it
        if row.record.get("training_record"):
            trainings.add(row.training)
        device, count = _devices(row)
        trained, others = _seconds(row, is_first)
        seconds[device] += count * trained + _devices(row, measuring=True)[1] * others
        if is_first:
            taken = _training_flops(row)
            flops[row.training] = max(flops.get(row.training, 0.0), taken)
            compile_seconds += (row.record.get("training_record") or {}).get("compile_seconds", 0.0)
        if "timing" in row.record:
            timing = row.record["timing"]
            sessions.setdefault((timing["started"], timing["finished"]), row)
    for (started, finished), row in sessions.items():  # times that were taken again, in turns
        device, count = _devices(row, measuring=True)
        seconds[device] += count * seconds_between(started, finished)
    return Compute(
        len(ended),
        len(trainings),
        math.fsum(flops.values()),
        {device: total / 3600 for device, total in seconds.items()},
        compile_seconds,
        sum(row.status in ("failed", "diverged") for row in ended),
        sum(row.status == "pruned" for row in ended),
        len(trials) - len(ended),
    )


def _devices(row: TrialRow, *, measuring: bool = False) -> tuple[str, float]:
    """Return the kind of device that a trial holds, and how many, as it trains or measures."""
    recorded = row.record.get("experiment", {}).get("resources") or {}
    resources = ResourcesConfig.model_validate(recorded)
    if measuring and row.record["provenance"].get("pauses"):  # a task of one worker measured it
        resources = resources.one_worker
    return ("GPU", resources.devices) if resources.devices else ("CPU core", resources.cpus)


def _seconds(row: TrialRow, is_first: bool) -> tuple[float, float]:
    """Return the seconds of a trial's optimizer steps, if it is the first that has its training,
    and of all else.
    """
    provenance = row.record["provenance"]
    attempt = seconds_between(provenance["started"], provenance["finished"])
    training = row.record.get("training_record") or {}
    steps = int(training.get("steps") or 0)
    if not is_first or not steps:
        return 0.0, attempt
    step_seconds = float(training["seconds"]) / steps
    branched = int(training.get("branched_at") or 0)
    resumed = max([branched, *map(int, training.get("resumed_from") or ())])
    in_attempt = step_seconds * (steps - resumed)
    is_own = attempt >= in_attempt - 1.0  # else it was trained for another sweep; times are whole
    others = max(0.0, attempt - in_attempt) if is_own else attempt
    return step_seconds * (steps - branched), others


def _training_flops(row: TrialRow) -> float:
    """Return the FLOPs of the steps that a trial's training has taken itself."""
    flops = float((row.record.get("model") or {}).get("training_flops", 0))
    if pruned := row.record.get("pruned"):
        return flops * float(pruned["step"]) / float(pruned["steps"])
    training = row.record.get("training_record") or {}
    if not training.get("steps"):
        return 0.0
    return flops * (1 - int(training.get("branched_at") or 0) / int(training["steps"]))


def seconds_between(started: str, finished: str) -> float:
    """Return the seconds from one ISO 8601 time to another."""
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
