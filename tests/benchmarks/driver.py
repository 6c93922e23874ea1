"""What orchestration costs: planning, the driver beside bare Ray tasks, and its memory.

The trials do nothing but be recorded, so what is left is kvlab: locks, the record, queues.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvlab.spec import load_sweep
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors import EXECUTORS
from kvlab.trial import Store
from tests.sweep.stub import EXPERIMENT, StubRun, identify

TRIALS = 1000
PLANNED = 10_000


def run() -> Iterator[str]:
    """Planning 10,000 trials; then 1,000 through each executor and as bare Ray tasks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _planning(folder)
        yield from _driving(folder, "inline")
        yield from _driving(folder, "ray")
        yield f"{TRIALS:,} bare Ray tasks: {1000 * _bare(TRIALS) / TRIALS:.1f} ms each"


def _sweep(folder: Path, count: int) -> Path:
    rates = "".join(
        f"    r{n}: {{training.learning_rate: {1e-4 * (n + 1):.6f}}}\n" for n in range(count // 10)
    )
    text = f"question: q\nexperiment: e.yaml\nfactors:\n  rate:\n{rates}seeds: {list(range(10))}\n"
    (folder / "e.yaml").write_text(EXPERIMENT.replace("tokens: 320", "tokens: 16"))
    path = folder / f"s{count}.yaml"
    path.write_text(text)
    return path


def _planning(folder: Path) -> Iterator[str]:
    path, began = _sweep(folder, PLANNED), time.process_time()
    sweep = load_sweep(path)
    read = time.process_time()
    planned = plan(sweep, Store(folder / "none"), identify=identify)
    done = time.process_time()
    yield (
        f"{len(planned.trials):,} trials: read in {read - began:.2f} s, planned in"
        f" {done - read:.2f} s of processor time"
    )


def _driving(folder: Path, executor: str) -> Iterator[str]:
    store = Store(folder / executor)
    planned = plan(load_sweep(_sweep(folder, TRIALS)), store, identify=identify)
    running = EXECUTORS[executor](StubRun(store.path, name=planned.sweep.name), None)
    memory: list[int] = []
    process = psutil.Process()
    try:
        driver = Driver(
            planned, store, running, on_result=lambda _: memory.append(process.memory_info().rss)
        )
        began = time.monotonic()
        summary = driver.run()
        seconds = time.monotonic() - began
    finally:
        running.close()
    assert summary.states["done"] == TRIALS
    half, last = memory[TRIALS // 2], memory[-1]
    yield (
        f"{TRIALS:,} trials through the driver, {executor}: {1000 * seconds / TRIALS:.1f} ms each;"
        f" its memory {half / 1e6:.0f} MB at half, {last / 1e6:.0f} MB at the end"
    )


def _bare(count: int) -> float:
    """Seconds of as many empty Ray tasks, a few in flight as the driver has them."""
    import ray

    from kvlab.sweep.executors.machine import cpu_count

    ray.init(num_cpus=cpu_count(), include_dashboard=False, log_to_driver=False, logging_level=40)
    task = ray.remote(max_retries=0)(lambda: None)
    ray.get([task.remote() for _ in range(20)])
    began, flying = time.monotonic(), []
    for _ in range(count):
        if len(flying) >= cpu_count():
            _, flying = ray.wait(flying, num_returns=1)
        flying.append(task.remote())
    ray.get(flying)
    seconds = time.monotonic() - began
    ray.shutdown()
    return seconds
