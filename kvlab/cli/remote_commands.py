"""`status`, `logs` and `stop` for a store that only a cluster can read: run there as Ray jobs."""

import json
import os
import re
import sys
from datetime import UTC, datetime

from kvlab.cli.terminal import format_table
from kvlab.errors import UsageError
from kvlab.sweep.ops.ray_jobs import DriverJob, RayJobs, find_driver_job

_TRIAL_ID_PREFIX = re.compile(r"[0-9a-f]{1,16}\Z")


def remote_status(address: str, sweep: str | None, *, as_json: bool) -> int:
    """Print the driver's job and the output of `kvlab status` there; without a sweep, all jobs."""
    jobs = RayJobs(address)
    if sweep is None:
        drivers = jobs.list_drivers()
        facts = [_collect_job_facts(job) for job in drivers]
        print(json.dumps(facts, indent=1) if as_json else _format_jobs(drivers))
        return 0
    job = find_driver_job(jobs, sweep)
    words = ["status", sweep, "--store", job.store]
    code, text = _collect_answer(jobs, [*words, "--json"] if as_json else words)
    if as_json and code == 0:
        print(json.dumps({**json.loads(text), "job": _collect_job_facts(job)}, indent=1))
        return 0
    if not as_json:
        print(_format_job(job))
    sys.stdout.write(text)
    return code


def remote_logs(address: str, name: str, store: str, words: list[str], *, follow: bool) -> int:
    """Print the output of a driver or the log of a trial.

    Args:
        address: Of the cluster.
        name: Of a sweep, or the first digits of a trial's id.
        store: Where to look for a trial if absolute; otherwise the newest driver's store.
        words: Further arguments of `kvlab logs`.
        follow: Print until it ends.

    Returns:
        The exit code of a driver that was followed to its end, otherwise that of the command.
    """
    jobs = RayJobs(address)
    job = jobs.find_driver(name)
    if job is not None:
        for piece in jobs.read_output(job.name, follow=follow):
            _write(piece)
        return jobs.wait_for_exit_code(job.name) if follow else 0
    newest = next(iter(jobs.list_drivers()), None)
    if not _TRIAL_ID_PREFIX.match(name):
        find_driver_job(jobs, name)  # raises and lists the drivers
    if not os.path.isabs(store):
        store = find_driver_job(jobs, name).store if newest is None else newest.store
    return _stream_answer(jobs, ["logs", name, *words, "--store", store])


def remote_stop(address: str, sweep: str, *, force: bool, as_json: bool) -> int:
    """Ask a driver's job to stop at the next checkpoints, or with ``force`` end it."""
    jobs = RayJobs(address)
    job = find_driver_job(jobs, sweep)
    if not job.is_running:
        text = f"sweep = {sweep} is not running at {address}"
        raise UsageError(f"{text}: its last driver {_describe_job_state(job)}")
    if not force:
        words = ["stop", sweep, "--store", job.store]
        return _stream_answer(jobs, [*words, "--json"] if as_json else words)
    jobs.stop(job.name)
    jobs.wait_for_exit_code(job.name)
    if as_json:
        print(json.dumps({"sweep": sweep, "ended": True}))
    else:
        print(f"{sweep} was ended; submit it again to go on from the last checkpoints")
    return 0


def _stream_answer(jobs: RayJobs, words: list[str]) -> int:
    """Print the output of a command as it comes and return its exit code."""
    previous = ""  # the last piece is the exit code
    for piece in jobs.run_command(words):
        _write(previous)
        previous = piece
    return int(previous)


def _collect_answer(jobs: RayJobs, words: list[str]) -> tuple[int, str]:
    *pieces, code = jobs.run_command(words)
    return int(code), "".join(pieces)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _format_jobs(jobs: list[DriverJob]) -> str:
    if not jobs:
        return "no driver was submitted there yet; do it with `kvlab submit SWEEP --detach`"
    rows = [
        [job.sweep, job.name, _start_time(job), _describe_job_state(job), job.store] for job in jobs
    ]
    return format_table([["sweep", "job", "started", "state", "store"], *rows], right="lllll")


def _format_job(job: DriverJob) -> str:
    return (
        f"job {job.name}: started {_start_time(job)}, {_describe_job_state(job)}; store {job.store}"
    )


def _describe_job_state(job: DriverJob) -> str:
    if job.is_running:
        return job.status
    if job.exit_code is None:
        return job.status if not job.message else f"{job.status}: {job.message}"
    return f"ended with exit code {job.exit_code}"


def _start_time(job: DriverJob) -> str:
    return datetime.fromtimestamp(job.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _collect_job_facts(job: DriverJob) -> dict[str, object]:
    return {
        "job": job.name,
        "sweep": job.sweep,
        "store": job.store,
        "state": job.status,
        "started": _start_time(job),
        "exit_code": job.exit_code,
    }
