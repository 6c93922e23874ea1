"""Commands as jobs of a Ray cluster, through Ray's job server; imports ray.

The server is a part of the dashboard of the cluster's head, which needs what ``kvlab[cluster]``
installs; here ray alone is enough. A job runs on the head, asks Ray for no resources, and finds
there its own kvlab, its own data folder and its own environment: only the few files that it is
given travel.
"""

import asyncio
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import ResourceError, UsageError

POLL_SECONDS = 0.3
SWEEP_KEY, STORE_KEY = "kvlab_sweep", "kvlab_store"
"""Keys of a driver's job under which it says what it drives."""

_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
_RAY_LOG_LINE = re.compile(r"\d{4}-.*\sINFO job_manager\.py:|Running entrypoint for job kvlab-")


@dataclass(frozen=True)
class DriverJob:
    """A job that drives a sweep, as the cluster tells.

    ``status`` is Ray's word in lower case; ``exit_code`` is None while it runs, or if it was
    ended from outside. ``started`` is in seconds since 1970.
    """

    name: str
    sweep: str
    store: str
    status: str
    started: float
    exit_code: int | None
    message: str

    @property
    def runs(self) -> bool:
        return self.status in ("pending", "running")


class RayJobs:
    """The job server of one cluster.

    Args:
        address: of the dashboard (``http://head:8265``), or of the cluster, as for ``submit``.

    Raises:
        ResourceError: it cannot be reached, or speaks to us not.
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
        self, words: Callable[[str], list[str]], *, files: Path | None, about: Mapping[str, str]
    ) -> str:
        """Starts ``python -m WORDS`` beside copies of ``files``, a folder; returns its name.

        Args:
            words: of the command, given the job's name.

        Raises:
            ResourceError: the server refuses it.
        """
        name = f"kvlab-{about.get(SWEEP_KEY, 'command')}-{uuid.uuid4().hex[:8]}"
        command = f"python -m {shlex.join(words(name))}"
        environment = {} if files is None else {"working_dir": str(files)}
        with _translate_errors(self.address):
            return self._client.submit_job(
                entrypoint=command,
                submission_id=name,
                runtime_env=environment,
                metadata=dict(about),
            )

    def drivers(self) -> list[DriverJob]:
        """The jobs that drive sweeps or did so, the newest first."""
        with _translate_errors(self.address):
            found = [_parse_driver_job(job) for job in self._client.list_jobs()]
        known = [job for job in found if job is not None]
        return sorted(known, key=lambda job: job.started, reverse=True)

    def driver(self, sweep: str) -> DriverJob | None:
        """The newest job that drives ``sweep``."""
        return next((job for job in self.drivers() if job.sweep == sweep), None)

    def output(self, name: str, *, follow: bool) -> Iterator[str]:
        """What a job has printed, piece by piece; with ``follow`` until it ends."""
        with _translate_errors(self.address):
            yield from _drop_ray_lines(
                self._followed(name) if follow else iter([self._client.get_job_logs(name)])
            )

    def exit_code(self, name: str) -> int:
        """Of a job that ends, after it has; 1 if it was ended from outside."""
        with _translate_errors(self.address):
            while not self._client.get_job_status(name).is_terminal():
                time.sleep(POLL_SECONDS)
            code = self._client.get_job_info(name).driver_exit_code
        return 1 if code is None else int(code)

    def stop(self, name: str) -> None:
        """Ends a job: by SIGTERM, and a few seconds later by SIGKILL."""
        with _translate_errors(self.address):
            self._client.stop_job(name)

    def answer(self, words: list[str]) -> Iterator[str]:
        """Runs ``kvlab WORDS`` there and gives what it prints; last its exit code, as digits."""
        name = self.start(lambda _: ["kvlab.cli.main", *words], files=None, about={})
        try:
            yield from self.output(name, follow=True)
            yield str(self.exit_code(name))
        finally:
            with suppress(Exception):  # still running, or gone: it is a leftover either way
                self._client.delete_job(name)

    def _followed(self, name: str) -> Iterator[str]:
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
    """The newest job that drives ``sweep``.

    Raises:
        UsageError: there is none.
    """
    found = jobs.driver(sweep)
    if found is None:
        known = ", ".join(dict.fromkeys(job.sweep for job in jobs.drivers())) or "it has none"
        text = f"sweep = {sweep} has no driver at {jobs.address} ({known})"
        raise UsageError(f"{text}; submit it with --detach")
    return found


def _parse_driver_job(job: Any) -> DriverJob | None:
    about = job.metadata or {}
    if SWEEP_KEY not in about or job.submission_id is None:
        return None
    return DriverJob(
        job.submission_id,
        about[SWEEP_KEY],
        about[STORE_KEY],
        str(job.status.value).lower(),
        (job.start_time or 0) / 1000,
        job.driver_exit_code,
        (job.message or "").split("\n", 1)[0],
    )


def _drop_ray_lines(pieces: Iterator[str]) -> Iterator[str]:
    """What a job printed, line by line, without Ray's own lines, which may stand anywhere."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield "".join(f"{line}\n" for line in lines if not _RAY_LOG_LINE.match(line))
    if not _RAY_LOG_LINE.match(rest):
        yield rest


def _enable_token_auth() -> None:
    """A cluster asks for a token by default; a client sends the one that it has only if told."""
    known = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if known or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class _translate_errors:
    """Turns what Ray's client raises into an error for people."""

    def __init__(self, address: str):
        self._address = address

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: Any
    ) -> None:
        if isinstance(error, RuntimeError | ConnectionError | OSError):
            raise ResourceError(_unreachable_message(self._address, error)) from error


def _unreachable_message(address: str, error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    text = f"address = {address} gives no job server: {first}"
    if type(error).__name__ == "AuthenticationError":
        return f"{text}; put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"
    way_out = "install kvlab[cluster] on its head and start it with --include-dashboard=true"
    return f"{text}; {way_out}, or name its dashboard, such as http://HEAD:8265"
