"""Time the trials of a sweep again at its end, alone and in turns.

Trials that run side by side disturb each other's times, and a machine that slows down in the
course of a sweep disturbs those that run one after the other. Where times of different cells do
not compare for such a reason, all trials of a seed are timed in one session after all trials have
ended: every round runs each once. A session is tried once. If something else used the machine
meanwhile, the record says so, and the first times stay, marked as disturbed.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import is_time, is_training_rate
from kvlab.errors import Stopped, UsageError
from kvlab.fs.lock import Lock
from kvlab.humanize import format_count, format_duration
from kvlab.layout import KVLayout, parameter_count
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.store.provenance import Origin, utc_now
from kvlab.store.record_forms import refuse_malformed
from kvlab.store.timings import TimedTrial, TimingSession, read_timings, write_timings
from kvlab.sweep.driver.driver_registry import StopRequest, join_sweep, stop_on_signal
from kvlab.sweep.executors.executor import Executor, run_tasks
from kvlab.sweep.planning.planner import Plan
from kvlab.trial.fingerprint import fingerprint
from kvlab.trial.joint_timing import JointTiming

MAX_SESSION_BYTES = 4 * 2**30
"""Of the models and caches of a session, which are in memory together."""


def announce_retiming(plan: Plan, at_once: int) -> str:
    """Say before the first trial whether its times will be taken again; empty if this is open.

    Args:
        at_once: number of trials that run side by side.
    """
    modes = {one.trial.experiment.benchmark.retime for one in plan.trials}
    if at_once < 2 or plan.sweep.search is not None or len(plan.cells) < 2 or modes == {"never"}:
        return ""
    text = f"{at_once} trials run side by side, which disturbs their times"
    return f"{text}; all are timed again at the end, alone and in turns"


def plan_retiming(plan: Plan, store: Store, repeat: bool = False) -> tuple[list[JointTiming], str]:
    """Decide from the record what to time again, once all trials of a sweep have ended.

    Args:
        repeat: also the sessions that were tried before and disturbed.

    Returns:
        The sessions that are to come, and the reason for people; empty if there are none.

    Raises:
        UsageError, StoreError: the store has no readable description of the sweep.
    """
    if plan.sweep.search is not None:  # it has chosen by the first times
        return [], ""
    study = Study.load(store, plan.sweep.name)
    has_times = any(is_time(m) and not is_training_rate(m) for m in study.measured_metrics)
    with refuse_malformed(plan.sweep.name):
        if not has_times or not study.timing_obstacle:
            return [], ""
    over = [
        {trial: timed.result for trial, timed in session.trials.items()}
        for session in read_timings(store.sweep_directory(plan.sweep.name))
        if not (repeat and session.failure)
    ]
    sessions = [
        task
        for task in _group_trials(plan, store)
        if {trial: store.result_seal(trial) for trial in task.experiments} not in over
    ]
    count = format_count(sum(len(task.experiments) for task in sessions), "trial")
    count = f"{count} in {format_count(len(sessions), 'session')}"
    line = f"{study.timing_obstacle}: timing {count} again, alone and in turns"
    return sessions, line if sessions else ""


def _group_trials(plan: Plan, store: Store) -> Iterator[JointTiming]:
    """Yield the trials that are timed together: one seed, one benchmark, the same resources.

    A group whose models and caches do not fit in memory together becomes several.
    """
    experiments = {one.trial.id: one.trial.experiment for one in plan.trials}
    for seed in plan.sweep.all_seeds:
        groups: dict[str, list[dict[str, Experiment]]] = {}
        sizes: dict[str, int] = {}
        for trial in dict.fromkeys(cell.trials.get(seed, "") for cell in plan.cells):
            if not trial or store.status(trial) != "done":
                continue
            experiment = experiments[trial]
            resources, benchmark = experiment.resources.one_worker, experiment.benchmark
            if benchmark.retime == "never":
                continue
            data = experiment.data.model_dump(mode="json") if "task" in benchmark.parts else None
            device = [resources.cpus, resources.devices > 0, resources.accelerator_type]
            shared = [benchmark.identity(), *device, data]
            key = fingerprint({"benchmark": shared})
            layout = KVLayout.of(experiment.model, experiment.serving)
            length = max(benchmark.prompt_tokens, *benchmark.context_lengths, 0)
            length += benchmark.new_tokens
            own = layout.stored_bytes(max(benchmark.batch_sizes), length, MODEL_DTYPE)
            own += 4 * parameter_count(experiment.model)
            if key not in groups or sizes[key] + own > MAX_SESSION_BYTES:
                groups.setdefault(key, []).append({})
                sizes[key] = 0
            groups[key][-1][trial] = experiment
            sizes[key] += own
        yield from (JointTiming(seed, trials) for group in groups.values() for trials in group)


def time_again(
    plan: Plan,
    store: Store,
    executor: Executor,
    origin: Origin,
    stop_flag: Path,
    on_progress: Callable[[str], None],
    *,
    repeat: bool,
) -> bool:
    """Time what `plan_retiming` finds with the executor of a driver whose trials have all ended.

    One driver of a sweep does this, and the others wait for it.

    Args:
        stop_flag: file that asks this driver to stop.
        on_progress: receives lines for people.
        repeat: see `plan_retiming`.

    Returns:
        False if asked to stop.

    Raises:
        StoreError: the store cannot be written.
    """
    name = plan.sweep.name
    directory = store.sweep_directory(name)
    stop = StopRequest(store, name, stop_flag)
    try:
        with (
            stop_on_signal(stop.request),
            join_sweep(store, name, None, exclusive=False),
            Lock(directory / "retime").hold(on_wait=stop.check) as fence,
        ):
            sessions, line = plan_retiming(plan, store, repeat)
            if line:
                on_progress(f"{line[:1].lower()}{line[1:]}")
            for task in sessions:
                count = format_count(len(task.experiments), "trial")
                started = time.monotonic()
                session = _run_session(task, store, executor, stop, origin.commit)
                kept = [  # others, and times that a session which failed does not replace
                    one
                    for one in read_timings(directory)
                    if not session.trials.keys() & one.trials.keys()
                    or (session.failure and not one.failure)
                ]
                write_timings(directory, [*kept, session], fence)
                outcome = f"done in {format_duration(time.monotonic() - started)}"
                if session.failure:
                    outcome = f"{session.failure}; the first times stay, marked as disturbed"
                    outcome += f" (kvlab submit {name} --retime repeats it)"
                on_progress(f"timing {count} of seed {task.seed} again: {outcome}")
    except (Stopped, UsageError):  # asked to stop, here or another driver of the sweep
        return False
    finally:
        stop.withdraw()
    return True


def _run_session(
    task: JointTiming, store: Store, executor: Executor, stop: StopRequest, commit: str | None
) -> TimingSession:
    """Time trials in a worker; see `kvlab.trial.joint_timing` for its answer.

    Returns:
        The session, without times if something disturbed it.

    Raises:
        Stopped: the driver has been asked to stop.
    """
    (ended,) = run_tasks(executor, [task], stop.check)  # the worker sees a request to stop as well
    stop.check()
    answer: dict[str, Any] = ended.outcome if ended.error is None else {"error": str(ended.error)}
    failure = answer.get("error") or answer.get("disturbance") or ""
    timed = dict[str, TimedTrial]()
    for trial in task.experiments:
        times = {"measurements": {}, "benchmark": ()} if failure else answer["trials"][trial]
        seal = store.result_seal(trial)
        timed[trial] = TimedTrial(seal, times["measurements"], tuple(times["benchmark"]))
    now = utc_now()
    unknown = {"started": now, "finished": now, "device": "", "threads": 0}
    facts: dict[str, Any] = {key: answer.get(key, other) for key, other in unknown.items()}
    return TimingSession(task.seed, **facts, commit=commit, trials=timed, failure=failure)
