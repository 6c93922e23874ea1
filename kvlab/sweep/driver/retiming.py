"""Time the trials of a sweep again at its end, alone and in turns (`benchmark.retime`).

Trials that run side by side disturb each other's times, and a machine that slows down in the
course of a sweep disturbs those that run one after the other. Where times of different cells do
not compare for such a reason, all trials of a seed are timed in one session after all trials have
ended: every round runs each once. A session is recorded if nothing else used the machine meanwhile.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import is_time, is_training_rate
from kvlab.errors import Stopped, StoreError, UsageError
from kvlab.fs.atomic_files import read_json
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock
from kvlab.humanize import format_count, format_duration
from kvlab.layout import KVLayout, parameter_count
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.store.provenance import Origin
from kvlab.store.timings import TimedTrial, TimingSession, read_timings, write_timings
from kvlab.sweep.driver.driver_registry import StopRequest, join_sweep
from kvlab.sweep.executors.executor import EndedTask, Executor
from kvlab.sweep.planning.planner import Plan
from kvlab.trial.fingerprint import ID_LENGTH, fingerprint
from kvlab.trial.joint_timing import JointTiming

MAX_SHARE = 0.1
"""Of the sweep's time that ``retime: auto`` may take."""

MAX_SESSION_BYTES = 4 * 2**30
"""Of the models and caches of a session, which are in memory together."""

MAX_SESSION_TRIALS = 64

ATTEMPTS = 2
"""Sessions that something else disturbs are tried this often."""

WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Retiming:
    """What is timed again, and why or why not.

    Attributes:
        sessions: the trials of each session that is to come, by seed and trial.
        will_run: whether they are timed.
        line: what is done and why, for people; empty if the times need nothing.
        seconds: predicted; None if the record does not say how long timings took.
        share: of the sweep's time; None without ``seconds``.
    """

    sessions: tuple[tuple[int, dict[str, Experiment]], ...] = field(default=(), repr=False)
    will_run: bool = False
    line: str = ""
    seconds: float | None = None
    share: float | None = None


def announce_retiming(plan: Plan, at_once: int) -> str:
    """Say before the first trial whether its times will be taken again; empty if this is open.

    Args:
        at_once: number of trials that run side by side.
    """
    modes = {one.trial.experiment.benchmark.retime for one in plan.trials}
    if at_once < 2 or plan.sweep.search is not None or len(plan.cells) < 2:
        return ""
    text = f"{at_once} trials are timed side by side, which disturbs their times"
    if modes == {"never"}:
        return f"{text}; they stay so (benchmark.retime: never)"
    if modes == {"always"}:
        return f"{text}; all are timed again at the end, alone and in turns"
    rule = "they are timed again at the end, alone and in turns, if that takes under a tenth of"
    return f"{text}; {rule} the sweep's time (benchmark.retime: auto)"


def plan_retiming(plan: Plan, store: Store) -> Retiming:
    """Decide from the record what to time again, once all trials of a sweep have ended.

    Raises:
        UsageError, StoreError: the store has no readable description of the sweep.
    """
    if plan.sweep.search is not None:  # it has chosen by the first times
        return Retiming()
    study = Study.load(store, plan.sweep.name)
    times = [m for m in study.measured_metrics if is_time(m) and not is_training_rate(m)]
    if not times or not study.timing_obstacle:
        return Retiming()
    sessions = tuple(_find_open_sessions(plan, store))
    if not sessions:
        return Retiming()
    return _decide(study, sessions)


def _decide(study: Study, sessions: tuple[tuple[int, dict[str, Experiment]], ...]) -> Retiming:
    """Return what is done about sessions that are needed."""
    modes = {one.benchmark.retime for _, trials in sessions for one in trials.values()}
    reason = study.timing_obstacle
    if "always" in modes:
        line = f"{reason}: timing {_count(sessions)} again, alone and in turns"
        return Retiming(sessions, True, f"{line} (benchmark.retime: always)")
    wanted = {trial for _, trials in sessions for trial in trials}
    records = {row.trial: row.record["provenance"] for row in study.done_rows}
    costs = [records[trial].get("timing_seconds") for trial in wanted]
    hint = "benchmark.retime: always times them again"
    if None in costs:
        line = f"{reason}, and its results do not say how long that took; {hint}"
        return Retiming(sessions, False, line)
    seconds = sum(costs)
    whole = _measure_busy_seconds(records.values())
    share = seconds / whole if whole else float("inf")
    cost = f"about {format_duration(seconds)}"
    if share < MAX_SHARE:
        line = f"{reason}: timing {_count(sessions)} again, alone and in turns, {cost},"
        line = f"{line} {share:.0%} of the sweep's time (benchmark.retime: auto)"
        return Retiming(sessions, True, line, seconds, share)
    line = f"{reason}. To time them again would take {cost}, over a tenth of the sweep's"
    return Retiming(sessions, False, f"{line} {format_duration(whole)}; {hint}", seconds, share)


def _count(sessions: Sequence[tuple[int, dict[str, Experiment]]]) -> str:
    trials = format_count(sum(len(trials) for _, trials in sessions), "trial")
    return f"{trials} in {format_count(len(sessions), 'session')}"


def _measure_busy_seconds(records: Iterable[dict[str, Any]]) -> float:
    """Return for how long at least one trial ran, in the last attempt of each."""
    spans = sorted(
        (datetime.fromisoformat(one["started"]), datetime.fromisoformat(one["finished"]))
        for one in records
    )
    seconds, end = 0.0, None
    for start, finish in spans:
        begin = start if end is None else max(start, end)
        seconds += max(0.0, (finish - begin).total_seconds())
        end = finish if end is None else max(end, finish)
    return seconds


def _find_open_sessions(plan: Plan, store: Store) -> Iterator[tuple[int, dict[str, Experiment]]]:
    """Yield the sessions of the sweep that are not recorded, the seeds in order."""
    sessions = read_timings(store.sweep_directory(plan.sweep.name))
    recorded = {_identify(one.seed, one.trials, store, one) for one in sessions}
    for seed, trials in _group_trials(plan, store):
        if _identify(seed, trials, store) not in recorded:
            yield seed, trials


def _identify(
    seed: int, trials: Iterable[str], store: Store, session: TimingSession | None = None
) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return the seed and the trials of a session, with the results that it timed."""
    if session is not None:
        return seed, tuple((trial, session.trials[trial].result) for trial in trials)
    return seed, tuple((trial, store.result_seal(trial)) for trial in trials)


def _group_trials(plan: Plan, store: Store) -> Iterator[tuple[int, dict[str, Experiment]]]:
    """Yield the trials that are timed together: one seed, one benchmark, the same resources."""
    experiments = {one.trial.id: one.trial.experiment for one in plan.trials}
    for seed in plan.sweep.all_seeds:
        groups: dict[str, dict[str, Experiment]] = {}
        for cell in plan.cells:
            trial = cell.trials.get(seed)
            if trial is None or store.status(trial) != "done":
                continue
            experiment = experiments[trial]
            if experiment.benchmark.retime != "never":
                groups.setdefault(_session_key(experiment), {})[trial] = experiment
        for group in groups.values():
            for trials in _split_by_memory(group):
                yield seed, trials


def _session_key(experiment: Experiment) -> str:
    """Return a key of what is measured and where."""
    resources, benchmark = experiment.resources, experiment.benchmark
    reads_text = "task" in benchmark.parts  # the trial's own
    data = experiment.data.model_dump(mode="json") if reads_text else None
    facts = [benchmark.identity(), resources.cpus, resources.devices > 0, data]
    return fingerprint({"benchmark": facts})


def _split_by_memory(group: dict[str, Experiment]) -> Iterator[dict[str, Experiment]]:
    """Yield as many trials at a time as fit into a session."""
    part: dict[str, Experiment] = {}
    size = 0
    for trial, experiment in group.items():
        own = _count_bytes(experiment)
        if part and (size + own > MAX_SESSION_BYTES or len(part) == MAX_SESSION_TRIALS):
            yield part
            part, size = {}, 0
        part[trial] = experiment
        size += own
    yield part


def _count_bytes(experiment: Experiment) -> int:
    """Return the bytes of a model and of its largest cache in the benchmark."""
    config = experiment.benchmark
    layout = KVLayout.of(experiment.model, experiment.serving)
    length = max(config.prompt_tokens, *config.context_lengths, 0) + config.new_tokens
    cache = layout.stored_bytes(max(config.batch_sizes), length, MODEL_DTYPE)
    return 4 * parameter_count(experiment.model) + cache


class RetimingRun:
    """Time trials again with the executor of a driver whose trials have all ended.

    Args:
        stop_flag: file that asks this driver to stop.
        on_progress: receives lines for people.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        executor: Executor,
        origin: Origin,
        stop_flag: Path,
        on_progress: Callable[[str], None],
    ):
        self._plan, self._store, self._executor = plan, store, executor
        self._origin, self._say = origin, on_progress
        self._name = plan.sweep.name
        self._directory = store.sweep_directory(self._name)
        self._stop_request = StopRequest(store, self._name, stop_flag)

    def stop(self) -> None:
        """Ask to stop after the present turn. Safe in a signal handler."""
        self._stop_request.request()

    def run(self) -> bool:
        """Time what is not timed yet; return False if asked to stop.

        One driver of a sweep does this, and the others wait for it.

        Raises:
            StoreError: the store cannot be written.
        """
        lock = Lock(self._directory / "retime")
        try:
            with (
                join_sweep(self._store, self._name, None, exclusive=False),
                lock.hold(on_wait=self._stop_request.check) as fence,
            ):
                retiming = plan_retiming(self._plan, self._store)
                if retiming.line:
                    self._say(f"{retiming.line[:1].lower()}{retiming.line[1:]}")
                for seed, trials in retiming.sessions if retiming.will_run else ():
                    self._time_session(seed, trials, fence)
        except (Stopped, UsageError):  # asked to stop, here or another driver of the sweep
            return False
        finally:
            self._stop_request.withdraw()
        return True

    def _time_session(self, seed: int, trials: dict[str, Experiment], fence: Fence | None) -> None:
        """Time one session, and record it if nothing disturbed it."""
        label = f"timing {format_count(len(trials), 'trial')} of seed {seed} again"
        reason = ""
        for _ in range(ATTEMPTS):
            started = time.monotonic()
            answer = self._run_session(seed, trials)
            reason = answer.get("error") or answer.get("disturbance") or ""
            if not reason:
                self._record(seed, answer, fence)
                self._say(f"{label}: done in {format_duration(time.monotonic() - started)}")
                return
            if "error" in answer:
                break
        self._say(f"{label}: not done, the first times stay: {reason}; submit again to repeat it")

    def _run_session(self, seed: int, trials: dict[str, Experiment]) -> dict[str, Any]:
        """Return the answer of a worker.

        Raises:
            Stopped: the driver has been asked to stop.
        """
        key = fingerprint({"timing": [seed, *trials]})[:ID_LENGTH]
        path = self._directory / f".timing-{key}.json"  # hidden: gc takes what a kill leaves
        task = JointTiming(f"timing-{key}", seed, trials, str(path))
        while not self._executor.has_room(task.resources):
            self._stop_request.check()
            time.sleep(WAIT_SECONDS)
        self._stop_request.check()
        self._executor.start(task)
        try:
            ended = self._wait()
            self._stop_request.check()
            return _read_answer(path, ended)
        finally:
            path.unlink(missing_ok=True)

    def _wait(self) -> EndedTask:
        while not (ended := self._executor.wait(WAIT_SECONDS)):
            with contextlib.suppress(Stopped):  # the worker sees the flag as well, and ends
                self._stop_request.check()
        return ended[0]

    def _record(self, seed: int, answer: dict[str, Any], fence: Fence | None) -> None:
        """Add a session to those of the sweep; it replaces those that had any of its trials."""
        trials = {
            trial: TimedTrial(
                self._store.result_seal(trial), one["measurements"], tuple(one["benchmark"])
            )
            for trial, one in answer["trials"].items()
        }
        facts = {key: answer[key] for key in ("started", "finished", "device", "threads")}
        session = TimingSession(seed, **facts, commit=self._origin.commit, trials=trials)
        earlier = read_timings(self._directory)
        kept = [one for one in earlier if not trials.keys() & one.trials.keys()]
        write_timings(self._directory, [*kept, session], fence)


def _read_answer(path: Path, ended: EndedTask) -> dict[str, Any]:
    """Return what a worker wrote, or why it wrote nothing."""
    if isinstance(ended.error, StoreError):
        raise ended.error
    if ended.error is not None:
        return {"error": str(ended.error)}
    try:
        answer: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        text = f"{path} was not written; workers and driver must share the store"
        raise StoreError(text) from None
    return answer
