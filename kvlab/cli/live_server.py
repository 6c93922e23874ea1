"""`kvlab ui --live`: a page that follows the sweeps of a store while they run.

It reads the store alone, so it serves any terminal, whoever drives the sweeps. It answers GET
requests and changes nothing but the reports in a temporary folder of its own. The page gets JSON
and puts every name of the record into text nodes, never into markup.
"""

import ipaddress
import json
import mimetypes
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvlab.cli.commands.status import collect_sweep_facts
from kvlab.cli.progress_display import format_outcome
from kvlab.errors import KvlabError, StoreError, UsageError
from kvlab.humanize import format_duration, sanitize_line, summarize_error
from kvlab.store import Store

REFRESH_SECONDS = 2.0
"""Age at which facts are read again; reading takes a fifth of the time at most."""

MAX_RUNNING, MAX_ENDED, MAX_FAILED = 64, 12, 12
"""Trials that are listed, by state."""

MAX_ENDED_CURVES = 24
CURVE_POINTS = 200

ASSETS = {
    "live.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
}


class LiveServer(ThreadingHTTPServer):
    """Serve the page of a store.

    Args:
        store: The store.
        host: Address or name to listen on.
        port: Port to listen on; 0 for any that is free.
        reports: Folder in which reports are written for the page.

    Raises:
        UsageError: The host or the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, store: Store, host: str, port: int, reports: Path):
        self.store, self.reports = store, LiveReports(store, reports)
        self._facts: dict[str, _Cached] = {}
        self._ended: dict[str, dict[str, Any]] = {}  # what is shown of trials that are done
        self._reading = threading.Lock()
        self.own_names = {"localhost", "127.0.0.1", "::1", host.lower()}
        self.own_names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        try:
            self.is_loopback = ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
            super().__init__((host, port), _Handler)
        except OSError as error:
            text = f"--host = {host} with --port = {port} cannot be used ({error.strerror})"
            raise UsageError(f"{text}; name another port, such as {port % 65000 + 1}") from None

    @property
    def address(self) -> str:
        """The address of the page."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/"

    def list_sweeps(self) -> list[dict[str, Any]]:
        """Return the name, the state and the counts of every sweep."""
        shown = ("sweep", "driven", "states")
        sweeps = []
        for name in self.store.sweep_names():
            try:
                facts = self._read(name)
            except StoreError:  # its own page says what is wrong with it
                facts = {"sweep": name, "driven": False, "states": {"damaged": 1}}
            sweeps.append({key: facts[key] for key in shown})
        return sweeps

    def describe_sweep(self, name: str) -> dict[str, Any]:
        """Return what the page shows of one sweep.

        Raises:
            UsageError: The store has no such sweep.
        """
        if name not in self.store.sweep_names():
            raise UsageError(f"{name} is not a sweep of this store")
        return self._read(name)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the facts of a sweep, from a moment ago if they were just read."""
        with self._reading:
            cached = self._facts.get(name)
            if cached is None or cached.is_old():
                cached = self._facts[name] = _Cached(lambda: self._collect(name))
            return cached.value

    def _collect(self, name: str) -> dict[str, Any]:
        facts = collect_sweep_facts(self.store, name)
        trials = facts["trials"]
        by_state: dict[str, list[dict[str, Any]]] = {}
        for trial in trials:
            by_state.setdefault(trial["state"], []).append(trial)
        ended = sorted(by_state.get("done", []), key=self._ended_at, reverse=True)
        failed = [t for t in trials if t["state"] in ("failed", "diverged", "pruned")]
        running = [self._describe_running(t) for t in by_state.get("running", [])[:MAX_RUNNING]]
        left = facts["pace"]["seconds_left"]
        return {
            "sweep": facts["sweep"],
            "question": sanitize_line(str(facts.get("question") or "")),
            "stage": facts.get("stage"),
            "search": [sanitize_line(line) for line in facts.get("search", ())],
            "driven": facts["driven"],
            "states": facts["states"],
            "total": len(trials),
            "left": None if left is None else format_duration(left),
            "trials_per_hour": facts["pace"]["trials_per_hour"],
            "running": running,
            "ended": [self._describe_ended(trial) for trial in ended[:MAX_ENDED]],
            "failed": [_describe(trial) for trial in failed[-MAX_FAILED:]],
            "curves": [*map(_running_curve, running), *self._ended_curves(ended)],
        }

    def _ended_at(self, trial: dict[str, Any]) -> float:
        path = self.store.trial_directory(trial["trial"]) / "result.json"
        return path.stat().st_mtime if path.exists() else 0.0

    def _describe_running(self, trial: dict[str, Any]) -> dict[str, Any]:
        progress = self.store.progress(trial["trial"]) or {}
        left = progress.get("seconds_left")
        return {
            **_describe(trial),
            "stage": progress.get("stage", "starting"),
            "step": progress.get("step", 0),
            "steps": progress.get("steps", 0),
            "loss": progress.get("loss"),
            "tokens_per_second": progress.get("tokens_per_second"),
            "left": None if left is None else format_duration(left),
            "curves": progress.get("curves") or {},
        }

    def _describe_ended(self, trial: dict[str, Any]) -> dict[str, Any]:
        """Return a trial that is done, whose outcome does not change any more."""
        key = trial["trial"]
        if "detail" not in self._ended.setdefault(key, {}):
            try:
                self._ended[key]["detail"] = sanitize_line(format_outcome(self.store, key))
            except StoreError as error:
                self._ended[key]["detail"] = summarize_error(error)
        return {**_describe(trial), "detail": self._ended[key]["detail"]}

    def _ended_curves(self, ended: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the validation curves of the newest trainings that are done, each once."""
        by_training: dict[str, dict[str, Any]] = {}
        for trial in ended[: 2 * MAX_ENDED_CURVES]:
            kept = self._ended.setdefault(trial["trial"], {})
            if "training" not in kept:
                try:
                    result = self.store.result(trial["trial"]) or {}
                except StoreError:
                    result = {}
                points = (result.get("curves") or {}).get("validation_loss") or []
                kept |= {"training": result.get("training", ""), "points": _thin(points)}
            label = _describe(trial)["label"]
            curve = {"trial": trial["trial"], "label": label, "is_running": False, "train": []}
            by_training.setdefault(kept["training"], {**curve, "validation": kept["points"]})
        return list(by_training.values())[:MAX_ENDED_CURVES]


class _Cached:
    """A value, and when it was read."""

    def __init__(self, read: Callable[[], dict[str, Any]]):
        began = time.monotonic()
        self.value = read()
        self._read_at = time.monotonic()
        self._keep = max(REFRESH_SECONDS, 5 * (self._read_at - began)) - 0.5

    def is_old(self) -> bool:
        return time.monotonic() - self._read_at > self._keep


def _is_address(host: str) -> bool:
    """Whether a host is an IP address: no other site can make a name lead here with one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _describe(trial: dict[str, Any]) -> dict[str, Any]:
    """Return a trial with its cell, or its settings in a search, in words."""
    return {
        "trial": trial["trial"],
        "label": sanitize_line(f"{trial['settings']} seed={trial['seed']}"),
        "state": trial["state"],
        "detail": sanitize_line(trial["detail"]),
    }


def _running_curve(trial: dict[str, Any]) -> dict[str, Any]:
    """Take the curves out of a running trial."""
    curves = trial.pop("curves")
    return {
        "trial": trial["trial"],
        "label": trial["label"],
        "is_running": True,
        "train": _thin(curves.get("train_loss") or []),
        "validation": _thin(curves.get("validation_loss") or []),
    }


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Return ``[tokens, loss]`` of at most `CURVE_POINTS` points, the last among them."""
    step = -(-len(points) // CURVE_POINTS) or 1
    kept = points[::-1][::step][::-1]
    return [[tokens, loss] for _, tokens, loss in kept]


class LiveReports:
    """Reports of sweeps that may still run, written again when they are asked for.

    Args:
        store: The store.
        folder: Where they are written.
    """

    def __init__(self, store: Store, folder: Path):
        self._store, self._folder = store, folder.resolve()
        self._written: dict[str, tuple[str | None, ...]] = {}
        self._writing = threading.Lock()  # matplotlib's settings belong to the process

    def update(self, name: str) -> None:
        """Write the report of a sweep, if a trial has ended since the last one."""
        from kvlab.report import write_report

        with self._writing:
            states = tuple(map(self._store.status, self._store.sweep_trials(name)))
            if self._written.get(name) != states:
                write_report(self._store, name, self._folder)
                self._written[name] = states

    def find(self, name: str, path: str) -> Path | None:
        """Return a file of a report; None if the report has no such file."""
        folder = self._folder / name
        try:
            found = (folder / path).resolve()
        except (ValueError, OSError):  # a zero byte, a name that is too long
            return None
        return found if found.is_relative_to(folder) and found.is_file() else None


class _Handler(BaseHTTPRequestHandler):
    """Answer one request."""

    server: LiveServer
    server_version = "kvlab"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._is_asked_by_its_name():
            self._send_text(HTTPStatus.FORBIDDEN, "this host name is not the page's own")
            return
        try:
            self._answer([unquote(part) for part in urlsplit(self.path).path.split("/")[1:]])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the reader has left
        except UsageError as error:
            self._send_text(HTTPStatus.NOT_FOUND, str(error))
        except (KvlabError, OSError) as error:
            self._send_text(HTTPStatus.INTERNAL_SERVER_ERROR, summarize_error(error))

    do_HEAD = do_GET

    def _is_asked_by_its_name(self) -> bool:
        """Whether the request names this machine: another site's page may not read the record."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        if host in self.server.own_names:
            return True
        return not self.server.is_loopback and _is_address(host)

    def _answer(self, parts: list[str]) -> None:
        match parts:
            case [""] | ["sweep", _]:
                self._send_asset("live.html", "text/html; charset=utf-8")
            case [name] if name in ASSETS:
                self._send_asset(name, ASSETS[name])
            case ["api", "sweeps"]:
                self._send_json(self.server.list_sweeps())
            case ["api", "sweep", name]:
                self._send_json(self.server.describe_sweep(name))
            case ["report", name, *path]:
                self._send_report(name, "/".join(path))
            case _:
                raise UsageError("there is no such page")

    def _send_report(self, name: str, path: str) -> None:
        self.server.describe_sweep(name)  # an unknown name writes nothing
        if path == "report.html":
            self.server.reports.update(name)
        found = self.server.reports.find(name, path)
        if found is None:
            raise UsageError("the report has no such file")
        kind = mimetypes.guess_type(found.name)[0] or "text/plain"
        # the page of a report declares its own policy, since its scripts and styles are inside
        self._send(found.read_bytes(), kind if "html" in kind else f"{kind}; charset=utf-8", "")

    def _send_asset(self, name: str, kind: str) -> None:
        self._send((files("kvlab.cli") / "live" / name).read_bytes(), kind)

    def _send_json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), "application/json; charset=utf-8")

    def _send_text(self, status: HTTPStatus, text: str) -> None:
        self._send(f"{text}\n".encode(), "text/plain; charset=utf-8", status=status)

    def _send(
        self,
        content: bytes,
        kind: str,
        policy: str = "default-src 'none'; script-src 'self'; connect-src 'self';"
        " style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-src 'self'",
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "SAMEORIGIN")
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the page asks every two seconds."""


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
        tempfile.TemporaryDirectory(prefix="kvlab-live-") as folder,
        LiveServer(store, host, port, Path(folder)) as server,
    ):
        tell(f"{server.address} follows the sweeps of {store.path}; Ctrl-C ends it")
        if not server.is_loopback:
            tell(
                f"--host = {host} is reachable from other machines: whoever opens the page there"
                " can read every result of this store, and change nothing"
            )
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            tell("ended")
