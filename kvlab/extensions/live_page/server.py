"""`kvlab live`: a page that follows the sweeps of a store while they run.

It reads the store alone, so it serves any terminal, whoever drives the sweeps. It answers GET
requests and changes nothing but the reports in a temporary folder of its own. The page gets JSON
and puts every name of the record into text nodes, never into markup.
"""

import contextlib
import errno
import ipaddress
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvlab.cli.commands.status import collect_sweep_facts
from kvlab.cli.progress_display import format_outcome
from kvlab.errors import KvlabError, StoreError, UsageError
from kvlab.humanize import format_duration, sanitize_line, summarize_error
from kvlab.store import Store
from kvlab.store.timings import TIMINGS_FILE

REFRESH_SECONDS = 2.0
"""Age at which facts are read again; reading takes a fifth of the time at most."""

REQUEST_SECONDS = 10.0
"""A connection that has not sent its request after this time is closed."""

MAX_RUNNING, MAX_ENDED, MAX_FAILED = 64, 12, 12
"""Trials that are listed, by state."""

MAX_ENDED_CURVES = 24
CURVE_POINTS = 200

PROGRESS = ("stage", "step", "steps", "loss", "tokens_per_second")
"""What the page shows of a running trial's progress, as far as it is there."""

HEADERS = [
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "SAMEORIGIN"),
]
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-src 'self'"
)


class LivePage:
    """What the page shows of a store, read again when it is older than `REFRESH_SECONDS`.

    Args:
        store: The store.
        reports: Folder in which reports are written for the page.
    """

    def __init__(self, store: Store, reports: Path):
        self.store, self.reports = store, reports.resolve()
        self.reports.mkdir(parents=True, exist_ok=True)
        self._facts: dict[str, tuple[float, dict[str, Any]]] = {}  # until when, what
        self._ended: dict[tuple[str, int], dict[str, Any]] = {}  # of results, by when they came
        self._reading = threading.Lock()
        self._written: dict[str, list[int]] = {}  # when that came of which a report is
        self._writing = threading.Lock()  # matplotlib's settings belong to the process

    def list_sweeps(self) -> list[dict[str, Any]]:
        """Return the name, the state and the counts of every sweep."""
        sweeps = []
        for name in self.store.sweep_names():
            try:
                facts = self.describe_sweep(name)
            except StoreError:  # its own page says what is wrong with it
                facts = {"sweep": name, "driven": False, "states": {"damaged": 1}}
            sweeps.append({key: facts[key] for key in ("sweep", "driven", "states")})
        return sweeps

    def describe_sweep(self, name: str) -> dict[str, Any]:
        """Return what the page shows of one sweep.

        Raises:
            UsageError: The store has no such sweep.
        """
        if name not in self.store.sweep_names():
            raise UsageError(f"{name} is not a sweep of this store")
        with self._reading:
            until, facts = self._facts.get(name, (0.0, {}))
            began = time.monotonic()
            if began >= until:
                facts = self._collect(name)
                now = time.monotonic()
                keep = max(REFRESH_SECONDS, 5 * (now - began)) - 0.5
                self._facts[name] = now + keep, facts
            return facts

    def _collect(self, name: str) -> dict[str, Any]:
        facts = collect_sweep_facts(self.store, name)
        trials = facts["trials"]
        done = [trial for trial in trials if trial["state"] == "done"]
        done.sort(key=lambda trial: self._ended_at(trial["trial"]), reverse=True)
        failed = [t for t in trials if t["state"] in ("failed", "diverged", "pruned")]
        running, curves = [], []
        for trial in [one for one in trials if one["state"] == "running"][:MAX_RUNNING]:
            progress = self.store.progress(trial["trial"]) or {}
            shown, own = _describe(trial), progress.get("curves") or {}
            state = {name: progress.get(name) for name in PROGRESS}
            running.append({**shown, **state, "left": _show_time(progress.get("seconds_left"))})
            train, measured = own.get("train_loss") or [], own.get("validation_loss") or []
            curve = {"train": _thin(train), "validation": _thin(measured), "is_running": True}
            curves.append({"trial": trial["trial"], "label": shown["label"], **curve})
        by_training: dict[str, dict[str, Any]] = {}  # the newest that are done, each once
        for trial in done[: 2 * MAX_ENDED_CURVES]:
            kept, label = self._read_ended(trial["trial"]), _describe(trial)["label"]
            curve = {"trial": trial["trial"], "label": label, "is_running": False, "train": []}
            by_training.setdefault(kept["training"], {**curve, "validation": kept["points"]})
        return {
            **{name: facts[name] for name in ("sweep", "stage", "driven", "states")},
            "question": sanitize_line(str(facts.get("question") or "")),
            "search": [sanitize_line(line) for line in facts.get("search", ())],
            "total": len(trials),
            "left": _show_time(facts["pace"]["seconds_left"]),
            "trials_per_hour": facts["pace"]["trials_per_hour"],
            "running": running,
            "ended": [
                {**_describe(trial), "detail": self._read_ended(trial["trial"])["detail"]}
                for trial in done[:MAX_ENDED]
            ],
            "failed": [_describe(trial) for trial in failed[-MAX_FAILED:]],
            "curves": [*curves, *list(by_training.values())[:MAX_ENDED_CURVES]],
        }

    def _ended_at(self, trial: str) -> int:
        return _modified_at(self.store.trial_directory(trial) / "result.json")

    def _read_ended(self, trial: str) -> dict[str, Any]:
        """Return the outcome, the training and the validation curve of a trial that is done."""
        key = trial, self._ended_at(trial)  # it may run again
        if key not in self._ended:
            try:
                result = self.store.result(trial) or {}
                detail = sanitize_line(format_outcome(self.store, trial))
            except StoreError as error:
                result, detail = {}, summarize_error(error)
            points = (result.get("curves") or {}).get("validation_loss") or []
            training = result.get("training", "")
            self._ended[key] = {"detail": detail, "training": training, "points": _thin(points)}
        return self._ended[key]

    def find_report(self, name: str) -> Path:
        """Return the page of a sweep's report, written again if the record has changed since.

        Raises:
            UsageError: The store has no such sweep.
        """
        from kvlab.report import write_report

        self.describe_sweep(name)  # an unknown name writes nothing
        with self._writing:
            directory = self.store.sweep_directory(name)
            times = [_modified_at(directory / one) for one in ("sweep.json", TIMINGS_FILE)]
            times += map(self._ended_at, self.store.sweep_trials(name))
            if self._written.get(name) != times:
                write_report(self.store, name, self.reports)
                self._written[name] = times
        return self.reports / name / "report.html"


def _modified_at(path: Path) -> int:
    """Return when a file was written, in ns; 0 if there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _describe(trial: dict[str, Any]) -> dict[str, Any]:
    """Return a trial with its cell, or its settings in a search, in words."""
    return {
        "trial": trial["trial"],
        "label": sanitize_line(f"{trial['settings']} seed={trial['seed']}"),
        "state": trial["state"],
        "detail": sanitize_line(trial["detail"]),
    }


def _show_time(seconds: float | None) -> str | None:
    return None if seconds is None else format_duration(seconds)


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Return ``[tokens, loss]`` of at most `CURVE_POINTS` points, the last among them."""
    step = -(-len(points) // CURVE_POINTS) or 1
    kept = points[::-1][::step][::-1]
    return [[tokens, loss] for _, tokens, loss in kept]


def make_app(page: LivePage, host: str) -> Starlette:
    """Return the application that serves a page.

    Args:
        page: The page.
        host: Address or name that the server listens on; others than this machine's are refused.
    """
    assets = files("kvlab.extensions.live_page") / "page"
    own_names = {"localhost", "127.0.0.1", "::1", host.lower()}
    own_names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    takes_addresses = not is_loopback(host)

    def is_own_name(asked: str) -> bool:
        """Whether a request names this machine: another site's page may not read the record.

        Where other machines may read it, so may whoever asks by an address: no other site can
        make a name lead here with one. `TrustedHostMiddleware` knows names alone.
        """
        try:
            name = urlsplit(f"//{asked}").hostname or ""
            return name in own_names or (takes_addresses and bool(ipaddress.ip_address(name)))
        except ValueError:
            return False

    def show_page(_: Request) -> Response:
        return Response((assets / "live.html").read_bytes(), media_type="text/html")

    def say_error(_: Request, error: Exception) -> Response:
        if isinstance(error, OSError):
            text = error.strerror or type(error).__name__
        else:  # without folders, which are this machine's own affair
            text = re.sub(r"(?<![\w.])/(?:[^\s/]+/)+", "", summarize_error(error))
        return PlainTextResponse(f"{text}\n", 404 if isinstance(error, UsageError) else 500)

    async def guard(request: Request, proceed: RequestResponseEndpoint) -> Response:
        if not is_own_name(request.headers.get("host", "")):
            return PlainTextResponse("this host name is not the page's own\n", 403)
        response = await proceed(request)
        if not request.scope["path"].startswith("/report/"):  # a report declares its own policy
            response.headers["Content-Security-Policy"] = POLICY
        return response

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/sweep/{name}", show_page),
            Route("/api/sweeps", lambda _: JSONResponse(page.list_sweeps())),
            Route(
                "/api/sweep/{name}", lambda r: JSONResponse(page.describe_sweep(**r.path_params))
            ),
            Route(
                "/report/{name}/report.html",
                lambda r: FileResponse(page.find_report(**r.path_params)),
            ),
            Mount("/report", StaticFiles(directory=str(page.reports))),
            Mount("/", StaticFiles(directory=str(assets))),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers={KvlabError: say_error, OSError: say_error, ValueError: say_error},
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


class _ImpatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request does not come; uvicorn would wait for it."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.cycle is None:
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a host; port 0 is any that is free.

    Raises:
        UsageError: The host or the port cannot be used.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # the address follows
        text = f"--host = {host} with --port = {port} cannot be used ({reason})"
        remedy = "an address of this machine, such as 127.0.0.1"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = f"another port, such as {port % 65000 + 1}"
        raise UsageError(f"{text}; name {remedy}") from None


def make_server(page: LivePage, host: str) -> uvicorn.Server:
    """Return a server of a page, which ``run(sockets=[listen(host, port)])`` starts."""
    config = uvicorn.Config(
        make_app(page, host),
        http=_ImpatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        headers=HEADERS,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def serve_live(store: Store, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        store: The store.
        host: Address or name to listen on.
        port: Port to listen on.
        tell: Gets the lines that the user is to read.

    Raises:
        UsageError: The host or the port cannot be used.
    """
    with (
        listen(host, port) as listener,
        tempfile.TemporaryDirectory(prefix="kvlab-live-") as folder,
    ):
        shown, port = listener.getsockname()[:2]
        shown = "127.0.0.1" if shown == "0.0.0.0" else shown
        tell(f"http://{shown}:{port}/ follows the sweeps of {store.path}; Ctrl-C ends it")
        if not is_loopback(host):
            text = f"--host = {host} is reachable from other machines: whoever opens the page"
            tell(f"{text} there can read every result of this store, and change nothing")
        with contextlib.suppress(KeyboardInterrupt):  # none where SIGINT was ignored at the start
            make_server(LivePage(store, Path(folder)), host).run(sockets=[listener])
        tell("ended")
