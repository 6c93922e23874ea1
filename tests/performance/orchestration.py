"""Overhead of orchestration: planning, opening a store, the driver beside bare Ray tasks of the
same function, and the driver's memory.

The function only records a trial, so the rest of the time is the orchestrator's: queues, and in
the driver the locks and states of the record. The driver's figures have limits, for an otherwise
idle machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvlab.fs.sealed_files import write_sealed_json
from kvlab.machine import cpu_count
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver, Plan, plan
from kvlab.sweep.executors import make_executor
from kvlab.sweep.planning.planner import describe_sweep
from tests.performance.timing import LimitMissed
from tests.support.stub_trials import StubRun, identify, write_many

PLAN_SECONDS = 3.0
"""Of processor time, to plan 10,000 trials."""
OPEN_SECONDS = 2.0
"""For `kvlab status` of a store of 10,000 ended trials, from a process's start to its end."""
OVERHEAD_MS = 30.0
"""A trial through the driver with Ray, beyond a bare Ray task."""
GROWTH_BYTES = 5e6
"""Of the driver's memory over the second half of 1,000 trials: the results of those are 8 MB."""

TRIALS = 1000
PLANNED = 10_000


def run() -> Iterator[str]:
    """Plan and open 10,000 trials, then run 1,000 through each orchestrator.

    Raises:
        LimitMissed: one of the driver's figures is beyond its limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line, planning = _time_planning(folder)
        yield line
        line, opening = _time_opening(folder)
        yield line
        each, growth = 0.0, [0.0]
        for executor in ("inline", "ray"):
            line, each, more = _time_driver(folder, executor)
            growth.append(more / 1e6)
            yield line
        bare = _time_bare_tasks(folder)
    yield (
        f"{TRIALS:,} bare Ray tasks of the same function: {1000 * bare[0]:.1f} ms each,"
        f" {1000 * bare[1]:.1f} ms of this process's time"
    )
    missed = [
        f"{what} {value:.3g} {unit}, over {limit:g}"
        for what, value, limit, unit in (
            ("planning takes", planning, PLAN_SECONDS, "s"),
            ("opening takes", opening, OPEN_SECONDS, "s"),
            ("the driver's memory grows by", max(growth), GROWTH_BYTES / 1e6, "MB"),
            ("a trial costs beyond a bare task", 1000 * (each - bare[0]), OVERHEAD_MS, "ms"),
        )
        if value > limit
    ]
    if missed:
        raise LimitMissed("; ".join(missed))


def _time_planning(folder: Path) -> tuple[str, float]:
    """Plan the large sweep; return a line and the seconds."""
    path, began = write_many(folder, PLANNED), time.process_time()
    sweep = load_sweep(path)
    read = time.process_time()
    planned = plan(sweep, Store(folder / "none"), identify=identify)
    done = time.process_time()
    text = f"{len(planned.trials):,} trials: read in {read - began:.2f} s, planned in"
    return f"{text} {done - read:.2f} s of processor time", done - read


def _plan_many(store: Store) -> tuple[Plan, StubRun]:
    """Return a sweep on a store of its own, and the function that both orchestrators run."""
    sweep = load_sweep(write_many(store.path.parent, TRIALS))
    planned = plan(sweep, store, identify=identify)
    return planned, StubRun(store.path, name=planned.sweep.name)


def _time_driver(folder: Path, executor: str) -> tuple[str, float, float]:
    """Drive the sweep; return a line, seconds per trial and the growth in bytes in its second half."""
    store = Store(folder / executor)
    planned, run = _plan_many(store)
    running = make_executor(executor, run)
    memory: list[int] = []
    process = psutil.Process()
    try:
        driver = Driver(
            planned, store, running, on_result=lambda _: memory.append(process.memory_info().rss)
        )
        began, before = time.monotonic(), time.process_time()
        summary = driver.run()
        seconds, busy = time.monotonic() - began, time.process_time() - before
    finally:
        running.close()
    assert summary.states["done"] == TRIALS
    half, last = memory[TRIALS // 2], memory[-1]
    text = (
        f"{TRIALS:,} trials through the driver, {executor}: {1000 * seconds / TRIALS:.1f} ms each,"
        f" {1000 * busy / TRIALS:.1f} ms of this process's time;"
        f" its memory {half / 1e6:.0f} MB at half, {last / 1e6:.0f} MB at the end"
    )
    return text, seconds / TRIALS, last - half


def _time_opening(folder: Path) -> tuple[str, float]:
    """Open a store of 10,000 ended trials in a new process; return a line and the seconds."""
    store = Store(folder / "large")
    planned = plan(load_sweep(write_many(folder, PLANNED)), store, identify=identify)
    first = planned.trials[0].trial
    StubRun(store.path, name=planned.sweep.name)(first)
    result = store.result(first.id)
    assert result is not None
    for one in planned.trials:
        path = store.trial_directory(one.trial.id) / "result.json"
        write_sealed_json(path, {**result, "files": {}, "trial": one.trial.id})
    store.write_sweep(
        describe_sweep(planned, yaml="question: q\n", experiment_yaml="", command="kvlab submit")
    )
    command = [sys.executable, "-m", "kvlab.cli.main", "status", "--json", planned.sweep.name]
    began, before = time.monotonic(), _count_processor_seconds()
    ended = subprocess.run([*command, "--store", store.path], capture_output=True, check=True)
    seconds, busy = time.monotonic() - began, _count_processor_seconds() - before
    assert json.loads(ended.stdout)["states"] == {"done": PLANNED}
    text = f"a store of {PLANNED:,} ended trials: `kvlab status` in {seconds:.2f} s, of which"
    return f"{text} {busy:.2f} s of processor time", seconds


def _count_processor_seconds() -> float:
    """Return the processor time of the children that this process has waited for."""
    used = os.times()
    return used.children_user + used.children_system


def _time_bare_tasks(folder: Path) -> tuple[float, float]:
    """Return seconds and processor seconds per Ray task, with as many in flight as the driver has."""
    import ray

    planned, work = _plan_many(Store(folder / "bare"))
    trials, warm_up = [one.trial for one in planned.trials], 20
    ray.init(num_cpus=cpu_count(), include_dashboard=False, log_to_driver=False, logging_level=40)
    try:
        task = ray.remote(max_retries=0)(lambda trial: work(trial))
        ray.get([task.remote(trial) for trial in trials[:warm_up]])
        began, before, flying = time.monotonic(), time.process_time(), []
        for trial in trials[warm_up:]:
            if len(flying) >= cpu_count():
                _, flying = ray.wait(flying, num_returns=1)
            flying.append(task.remote(trial))
        ray.get(flying)
        count = len(trials) - warm_up
        return (time.monotonic() - began) / count, (time.process_time() - before) / count
    finally:
        ray.shutdown()
