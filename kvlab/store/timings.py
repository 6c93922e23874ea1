"""Times that were taken again at the end of a sweep: ``sweeps/<name>/timings.json``.

A result is written once. What trials were timed again, alone and in turns, lies beside it in one
file of the sweep, because a time compares with the times of its own session alone, and another
sweep may have the same trial in another one. Each entry names the result that it belongs to by the
result's seal. `Store.result` puts its numbers in the place of the first ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.store.record_forms import read_if_whole

TIMINGS_FILE = "timings.json"


@dataclass(frozen=True)
class TimedTrial:
    """What one trial's session measured.

    Attributes:
        result: seal of the result whose times these replace.
        measurements: by the names of `kvlab.store.metrics.METRICS`.
        benchmark: lines as in a result.
    """

    result: str
    measurements: Mapping[str, float]
    benchmark: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class TimingSession:
    """Trials of one seed that were timed in turns.

    Attributes:
        seed: of the trials.
        started, finished: see `kvlab.store.provenance.utc_now`.
        device, threads: where.
        commit: of the kvlab that took the times; None outside a checkout.
        trials: by id.
        failure: why the session has no times, such as what else used the machine; empty if it has
            them. It is recorded so that it is not tried at every submit.
    """

    seed: int
    started: str
    finished: str
    device: str
    threads: int
    commit: str | None
    trials: Mapping[str, TimedTrial]
    failure: str = ""


_SESSIONS = TypeAdapter(list[TimingSession])


def read_timings(directory: Path) -> list[TimingSession]:
    """Return the sessions of a sweep; none if it has no file of them, or a damaged one.

    Args:
        directory: of the sweep.
    """
    # `kvlab verify` tells of a damaged one, and the next submit times again
    sessions = read_if_whole(directory / TIMINGS_FILE).get("sessions", [])
    return _SESSIONS.validate_python(sessions)


def write_timings(
    directory: Path, sessions: Iterable[TimingSession], fence: Fence | None = None
) -> None:
    """Write the sessions of a sweep.

    Raises:
        StoreError, LeaseLost: see `write_sealed_json`.
    """
    content = {"schema": 1, "sessions": [asdict(session) for session in sessions]}
    write_sealed_json(directory / TIMINGS_FILE, content, fence=fence)


def replace_times(
    result: Mapping[str, Any], session: TimingSession, timed: TimedTrial
) -> dict[str, Any]:
    """Return a result with the times of a session; its key ``timing`` says so."""
    facts = {**asdict(session), "trials": len(session.trials)}
    del facts["failure"]
    again = {line.get("metric") for line in timed.benchmark}
    lines = [line for line in result.get("benchmark", []) if line.get("metric") not in again]
    return {
        **result,
        "measurements": {**result["measurements"], **timed.measurements},
        "benchmark": [*lines, *timed.benchmark],
        "timing": facts,
    }
