"""Commands as jobs of a Ray cluster, through Ray's job server. Imports ray.

The server is part of the dashboard of the cluster's head, which needs what ``kvlab[cluster]``
installs; here ray alone is enough. A job runs on the head and asks Ray for no resources. It uses
the head's kvlab, data folder and environment; only the few files that it is given are sent.
"""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import ResourceError, UsageError
from kvlab.humanize import summarize_error

POLL_SECONDS = 0.3

SWEEP_KEY, STORE_KEY = "kvlab_sweep", "kvlab_store"
"""Keys of a driver's job metadata."""

_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
_RAY_LOG_LINE = re.compile(r"\d{4}-.*\sINFO job_manager\.py:|Running entrypoint for job kvlab-")


@dataclass(frozen=True)
class DriverJob:
    """A job that drives a sweep.

    Attributes:
        name: Of the job.
        sweep: Name of the sweep.
        store: Path of its store on the cluster.
        status: Ray's job status in lower case.
        started: Seconds since 1970.
        exit_code: None while it runs, or if it was ended from outside.
        message: Ray's, one line.
    """

    name: str
    sweep: str
    store: str
    status: str
    started: float
    exit_code: int | None
    message: str

    @property
    def is_running(self) -> bool:
        return self.status in ("pending", "running")


class RayJobs:
    """The job server of one cluster.

    Args:
        address: Of the dashboard (``http://head:8265``) or of the cluster, as for `kvlab submit`.

    Raises:
        ResourceError: The server cannot be reached, or rejects the client.
    """

    def __init__(self, address: str):
        self.address = address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        _enable_token_auth()  # Ray reads its environment when it is imported
        from ray.job_submission import JobSubmissionClient

        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self._client = JobSubmissionClient(address)
        except Exception as error:  # of many kinds: no server, another version, no token
            raise ResourceError(_unreachable_message(address, error)) from error

    def start(
        self,
        arguments: Callable[[str], list[str]],
        *,
        files: Path | None,
        metadata: Mapping[str, str],
    ) -> str:
        """Start ``python -m ARGUMENTS`` beside copies of ``files``.

        Args:
            arguments: Returns the arguments for the job's name.
            files: A folder, which becomes the working folder of the job.
            metadata: Kept with the job.

        Returns:
            The job's name.

        Raises:
            ResourceError: The server refuses it.
        """
        name = f"kvlab-{metadata.get(SWEEP_KEY, 'command')}-{uuid.uuid4().hex[:8]}"
        with _translate_errors(self.address):
            return self._client.submit_job(
                entrypoint=f"python -m {shlex.join(arguments(name))}",
                submission_id=name,
                runtime_env={} if files is None else {"working_dir": str(files)},
                metadata=dict(metadata),
            )

    def list_drivers(self) -> list[DriverJob]:
        """Return the jobs that drive sweeps or did so, the newest first."""
        with _translate_errors(self.address):
            jobs = map(_parse_driver_job, self._client.list_jobs())
            drivers = [job for job in jobs if job is not None]
        return sorted(drivers, key=lambda job: job.started, reverse=True)

    def find_driver(self, sweep: str) -> DriverJob | None:
        """Return the newest job that drives ``sweep``."""
        return next((job for job in self.list_drivers() if job.sweep == sweep), None)

    def read_output(self, name: str, *, follow: bool) -> Iterator[str]:
        """Yield what a job has printed, piece by piece; with ``follow`` until it ends."""
        with _translate_errors(self.address):
            yield from _drop_ray_lines(
                self._follow_output(name) if follow else iter([self._client.get_job_logs(name)])
            )

    def wait_for_exit_code(self, name: str) -> int:
        """Wait for the end of a job; return its exit code, 1 if it was ended from outside."""
        with _translate_errors(self.address):
            while not self._client.get_job_status(name).is_terminal():
                time.sleep(POLL_SECONDS)
            code = self._client.get_job_info(name).driver_exit_code
        return 1 if code is None else int(code)

    def stop(self, name: str) -> None:
        """End a job by SIGTERM, and a few seconds later by SIGKILL."""
        with _translate_errors(self.address):
            self._client.stop_job(name)

    def run_command(self, arguments: list[str]) -> Iterator[str]:
        """Run ``kvlab ARGUMENTS`` on the head.

        Yields:
            What it prints, and at last its exit code as digits.
        """
        name = self.start(lambda _: ["kvlab.cli.main", *arguments], files=None, metadata={})
        try:
            yield from self.read_output(name, follow=True)
            yield str(self.wait_for_exit_code(name))
        finally:
            with contextlib.suppress(Exception):  # it still runs, or is gone already
                self._client.delete_job(name)

    def _follow_output(self, name: str) -> Iterator[str]:
        loop, tail = asyncio.new_event_loop(), self._client.tail_job_logs(name)
        try:
            while True:
                try:
                    yield loop.run_until_complete(anext(tail))
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def find_driver_job(jobs: RayJobs, sweep: str) -> DriverJob:
    """Return the newest job that drives ``sweep``.

    Raises:
        UsageError: There is none.
    """
    job = jobs.find_driver(sweep)
    if job is None:
        sweeps = dict.fromkeys(driver.sweep for driver in jobs.list_drivers())
        names = ", ".join(sweeps) or "none has"
        text = f"sweep = {sweep} has no driver at {jobs.address} ({names})"
        raise UsageError(f"{text}; submit it with --detach")
    return job


def _parse_driver_job(job: Any) -> DriverJob | None:
    """Return one of Ray's jobs as a driver's, or None if it is another's."""
    metadata = job.metadata or {}
    if SWEEP_KEY not in metadata or job.submission_id is None:
        return None
    return DriverJob(
        name=job.submission_id,
        sweep=metadata[SWEEP_KEY],
        store=metadata[STORE_KEY],
        status=str(job.status.value).lower(),
        started=(job.start_time or 0) / 1000,
        exit_code=job.driver_exit_code,
        message=(job.message or "").split("\n", 1)[0],
    )


def _drop_ray_lines(pieces: Iterator[str]) -> Iterator[str]:
    """Yield a job's output line by line, without Ray's own lines, which may be anywhere."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield "".join(f"{line}\n" for line in lines if not _RAY_LOG_LINE.match(line))
    if not _RAY_LOG_LINE.match(rest):
        yield rest


def _enable_token_auth() -> None:
    """Let the client send the token that it has: it does so only if told, and clusters ask."""
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if has_token or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@contextlib.contextmanager
def _translate_errors(address: str) -> Iterator[None]:
    """Raise errors of Ray's client as ResourceError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise ResourceError(_unreachable_message(address, error)) from error


def _unreachable_message(address: str, error: BaseException) -> str:
    reason = summarize_error(error).rstrip(".")
    text = f"address = {address} gives no job server: {reason}"
    if type(error).__name__ == "AuthenticationError":
        return f"{text}; put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"
    hint = "install kvlab[cluster] on its head and start it with --include-dashboard=true"
    return f"{text}; {hint}, or name its dashboard, such as http://HEAD:8265"
