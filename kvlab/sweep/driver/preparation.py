"""What a driver does before the first trial: get evaluation sets, smoke test every architecture,
and check that all machines of a cluster share the store.

A baseline that trains for hours would occupy the only device, so the smoke tests come first. They
take seconds each. Where trainings are short they are skipped, unless requested. The trials of a
broken architecture are recorded as failed at once, and the others go on.
"""

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.data.hellaswag_dataset import get_hellaswag_file
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import format_bytes, format_count
from kvlab.layout.gpu_sharing import device_share, trials_per_device
from kvlab.own_extensions import name_members
from kvlab.store import Store
from kvlab.store.provenance import Origin
from kvlab.store.result import OUT_OF_MEMORY, Failure
from kvlab.sweep.driver.trial_queue import architecture_key
from kvlab.sweep.executors.executor import Executor, run_tasks
from kvlab.sweep.planning.planner import PlannedTrial
from kvlab.trial.finalize import record_failure
from kvlab.trial.smoke_test import SmokeResult, SmokeTest

MIN_TRAINING_SECONDS = 300.0
"""Duration of the longest training from which on smoke tests run without being requested."""

MAX_TRAINING_FLOPS = {"cpu": 1e11, "gpu": 2.5e15}
"""FLOP/s of a core and of a GPU, for a lower bound of a training's time. An H200 was measured at
4.5e14 in bfloat16; no GPU of today has a dense bfloat16 peak above 2.5e15 (B300)."""

_HANDLED_BY_TRIAL = (*OUT_OF_MEMORY, "diverged")
"""Failures that break no architecture: the trial uses a smaller microbatch, or records it."""


def prefetch_evaluation_sets(
    missing: Iterable[PlannedTrial], on_progress: Callable[[str], None]
) -> None:
    """Get HellaSwag if a trial of ``missing`` scores it.

    Workers could do it themselves, but that it is unavailable would be noticed only after hours
    of training. The text of the training is prepared when the trials are planned.

    Args:
        on_progress: Called with lines for people.

    Raises:
        DataError: It is unavailable.
    """
    if any(one.trial.experiment.evaluation.hellaswag_items != 0 for one in missing):
        get_hellaswag_file(on_progress)


def run_smoke_tests(
    missing: Sequence[PlannedTrial],
    check_stop: Callable[[], None],
    store: Store,
    executor: Executor,
    origin: Origin,
    on_progress: Callable[[str], None],
    *,
    requested: bool | None,
    flops_per_second: float | None,
) -> list[PlannedTrial]:
    """Test the architectures of ``missing``, and record the trials of broken ones as failed.

    Args:
        check_stop: Called repeatedly; raises Stopped.
        executor: Runs the tests. It must be idle.
        origin: Provenance of this run, for failures.
        on_progress: Called with lines for people.
        requested: Whether to run them; None runs them if trainings are long.
        flops_per_second: Measured training FLOP/s of a trial; None if not known.

    Returns:
        All of ``missing``, with ``gpus: auto`` replaced by a number.

    Raises:
        StoreError: The store cannot be written.
    """
    groups: dict[str, list[PlannedTrial]] = {}
    for planned in missing:
        groups.setdefault(smoke_test_key(planned), []).append(planned)
    if requested is None:  # one architecture is tested as well by its first trial
        trainings = (one for one in missing if one.trains)
        seconds = (estimate_training_seconds(one, flops_per_second) for one in trainings)
        requested = len(groups) > 1 and max(seconds, default=0.0) > MIN_TRAINING_SECONDS
    if not requested:  # only what `gpus: auto` measures
        groups = {k: own for k, own in groups.items() if own[0].trial.resources.gpus == "auto"}
    if not groups:
        return list(missing)
    on_progress(f"smoke test: one step of {format_count(len(groups), 'architecture')}")
    tests = [SmokeTest.of(group[0].trial) for group in groups.values()]
    results: dict[str, SmokeResult] = {}
    for ended in run_tasks(executor, tests, check_stop):
        if isinstance(ended.error, MemoryError):
            results[ended.task_id] = SmokeResult(failure=Failure.from_error(ended.error))
        elif ended.error is None:
            results[ended.task_id] = ended.outcome
        # else its process died, which the trials will handle
    prepared: dict[str, PlannedTrial] = {}
    broken = 0
    for test, group in zip(tests, groups.values(), strict=True):
        result = results.get(test.id, SmokeResult())
        failure = result.failure
        if failure is not None and failure.kind not in _HANDLED_BY_TRIAL:
            broken += 1
            for one in group:
                trace = result.traceback or ""
                record_failure(one.trial, store, origin, failure, trace)
        changes: dict[str, object] = {}
        if group[0].trial.resources.gpus == "auto":
            count = 1
            if result.peak_bytes and result.device_bytes:
                count = trials_per_device(result.peak_bytes, result.device_bytes)
                # as measured, since a part of the device would get a smaller one
                changes["microbatch_tokens"] = result.microbatch_tokens
            changes["gpus"] = device_share(count)
        prepared |= {planned.trial.id: planned.with_resources(**changes) for planned in group}
    peaks = [result.peak_bytes for result in results.values() if result.peak_bytes]
    peak = f"; at most {format_bytes(max(peaks))} of memory" if peaks else ""
    on_progress(f"smoke test: {broken or 'none'} broken{peak}")
    return [prepared.get(planned.trial.id, planned) for planned in missing]


def smoke_test_key(planned: PlannedTrial) -> str:
    """Return a key of what a test finds out: whether the architecture works, and its memory."""
    experiment = planned.trial.experiment
    training, resources = experiment.training, experiment.resources
    products = [getattr(training, key) for key in name_members("linear_products")]
    facts = [architecture_key(planned), training.precision, *products, training.steps > 0]
    facts += [resources.devices > 0, resources.accelerator_type]
    if resources.gpus == "auto":
        facts += [training.batch_tokens, training.compile, resources.model_dump(mode="json")]
    return json.dumps(facts)


def estimate_training_seconds(planned: PlannedTrial, flops_per_second: float | None) -> float:
    """Return about how long a training takes; without a measured rate, a lower bound."""
    resources = planned.trial.resources
    kind, count = ("gpu", resources.devices) if resources.devices else ("cpu", resources.cpus)
    return planned.flops / (flops_per_second or MAX_TRAINING_FLOPS[kind] * count)


# Whether all machines share the store


PATIENCE_SECONDS = 15.0
"""Time for a file to become visible: network mounts cache the contents of a folder."""

_DRIVER_FILE = "driver"


def check_store_is_shared(
    store: Path,
    folder: Path,
    run_on_all_machines: Callable[[Callable[[str], str], str], Mapping[str, Any]],
) -> None:
    """Write and read a few bytes in ``folder`` from here and from every machine.

    Args:
        store: The store's path, for the message.
        folder: Inside of it. Nothing stays there.
        run_on_all_machines: Calls a function of a path on every machine.

    Raises:
        UsageError: A machine does not share the store.
        StoreError: The store cannot be written here.
    """
    probe = folder.absolute() / f".probe-{uuid.uuid4().hex}"
    write_atomic(probe / _DRIVER_FILE, probe.name)
    try:
        answers, failed = run_on_all_machines(answer_probe, str(probe)), list[str]()
        for machine, answer in answers.items():
            if isinstance(answer, Exception):
                last_line = (str(answer).strip().splitlines() or [type(answer).__name__])[-1]
                failed.append(f"{machine} cannot run kvlab: {last_line}")
            elif answer.startswith(" "):
                failed.append(f"{machine}{answer}")
            elif not _file_arrives(probe / answer):
                failed.append(f"{machine} writes files that do not arrive here")
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if failed:
        text = f"store = {store} is not shared by {len(failed)} of {len(answers)} machines of the"
        text = f"{text} cluster: {'; '.join(failed[:3])}{'; ...' if failed[3:] else ''}"
        hint = "name one with --store on a file system that all of them mount at the same path"
        raise UsageError(f"{text}; {hint}")


def answer_probe(probe: str) -> str:
    """Read and write a file, on a machine of the cluster.

    Returns:
        The name of the file that was written here, or the problem after a space, with which no name
        starts.
    """
    folder = Path(probe)
    if not _file_arrives(folder / _DRIVER_FILE):
        return f" has no {folder.parent}, or another one than the driver"
    name = uuid.uuid4().hex
    try:
        (folder / name).write_text(folder.name)
    except OSError as error:
        return f" cannot write there: {error.strerror}"
    return name


def _file_arrives(path: Path) -> bool:
    """Return whether a file that contains the name of its folder is there, or appears in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and path.parent.parent.exists():
        with contextlib.suppress(OSError):  # it is not there yet, or its handle is stale
            if path.read_text() == path.parent.name:
                return True
        time.sleep(0.1)
    return False
