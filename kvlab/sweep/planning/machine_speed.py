"""How fast this machine trains, measured once and remembered in the user's cache folder.

A plan needs it before the first trial has ended; later the results of trials say more.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvlab.data.data_dir import get_data_dir
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json

UNCERTAINTY = 2.0
"""Trainings take between a half and twice the time that the rates here give."""

_MODULE = "kvlab.trial.speed_test"
_TIMEOUT_SECONDS = 120.0


def load_training_rates(
    threads: int, *, measure: bool = False, on_measure: Callable[[], None] = lambda: None
) -> dict[int, float] | None:
    """Return the FLOPs per second of training on CPU by the width of the model.

    Args:
        threads: Of one training.
        measure: Measure them, in a process with torch, if they are not remembered.
        on_measure: Called before that, which takes some seconds.

    Returns:
        None if they are not known and cannot be measured.
    """
    path = _rates_path(threads)
    try:
        return {int(width): float(rate) for width, rate in read_json(path).items()}
    except (FileNotFoundError, StoreError, ValueError, TypeError, AttributeError):
        pass  # not measured yet, or the file is damaged
    if not measure:
        return None
    on_measure()
    rates = _measure(threads)
    if rates is not None:
        with contextlib.suppress(StoreError):  # not writable: the next plan measures again
            write_json(path, rates)
    return rates


def interpolate_rate(rates: Mapping[int, float], width: int) -> float:
    """Return the rate at a width, linear in the logarithms; beyond the ends that of the end."""
    known = sorted(rates)
    width = min(max(width, known[0]), known[-1])
    below = max(one for one in known if one <= width)
    above = min(one for one in known if one >= width)
    if below == above:
        return rates[below]
    share = math.log(width / below) / math.log(above / below)
    return float(rates[below] ** (1 - share) * rates[above] ** share)


def _measure(threads: int) -> dict[int, float] | None:
    import subprocess  # takes a hundredth of a second, which most plans save

    command = [sys.executable, "-m", _MODULE, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        answer = subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT_SECONDS, env=environment, check=True
        )
        return {int(width): float(rate) for width, rate in json.loads(answer.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _rates_path(threads: int) -> Path:
    """Return the file of this machine: a cache folder may serve several."""
    name = f"{platform.node()}-{os.cpu_count()}-torch-{importlib.metadata.version('torch')}"
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name)
    return get_data_dir() / "training-rates" / f"{safe}-{threads}.json"
