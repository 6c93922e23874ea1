"""The Ray executor: run tasks on a Ray cluster. Imports ray.

Without an address it starts a local cluster, which ends with this process. Ray retries nothing:
``max_retries=0`` also keeps it from running a task again after the host's memory ran out. Usage
statistics are off.
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from kvlab.errors import ClusterLost, CodeChanged, ResourceError, StoreError, WorkerKilled
from kvlab.humanize import summarize_error
from kvlab.machine import cpu_count
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors.capacity import Capacity
from kvlab.sweep.executors.executor import EndedTask, RunTask
from kvlab.sweep.executors.reaper import Reaper
from kvlab.trial.run import Task, stop_at_sigterm

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

OBJECT_STORE_BYTES = 80 * 2**20
"""Close to Ray's minimum: a task takes a configuration and returns a word, or some numbers."""

ANSWER_SECONDS = 90.0
"""Time for a machine to start a process and call a function in it."""

START_ATTEMPTS = 3
"""Of a local cluster. Ray gives its daemon 30 seconds, too few on a machine with other load."""

LISTENER_SECONDS = 60.0
"""Time for a cluster that is being started to listen. Ray itself would try for many minutes."""

_LOST_MACHINE = (ray.exceptions.NodeDiedError, ray.exceptions.LocalRayletDiedError)

_WORKER_DEATHS = (
    *_LOST_MACHINE, ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError
)  # fmt: skip

_TOKEN = secrets.token_hex(32)
"""Of all local clusters of this process, since Ray reads it once: no other process uses them."""


class RayExecutor:
    """Run each task as a Ray task.

    A process reaches its cluster through a raylet. If this process's own raylet dies, a local
    cluster is started again, and a named one is connected to again. The tasks that ran have died
    with it, and the driver starts them again as after any other death. A local cluster is also
    started again if its GCS dies, before Ray ends this process for that.

    Args:
        run: Runs one task; sent to the workers once.
        address: Of a running cluster, such as ``auto`` or ``ray://host:10001``; None starts a
            local one.

    Raises:
        ResourceError: The cluster cannot be reached or started.
    """

    def __init__(self, run: RunTask, address: str | None):
        self._address = address
        self._reaper: Reaper | None = None
        self._output_filter = contextlib.ExitStack()
        self._output_filter.enter_context(contextlib.redirect_stdout(_RayOutputFilter(sys.stdout)))
        try:
            self._connect()
        except Exception as error:
            self.close(force=True)
            text = f"{self._where} cannot be used: {summarize_error(error)}; check it"
            if address and "RAY_AUTH_MODE" not in os.environ:
                text += " (one that asks for a token needs RAY_AUTH_MODE=token here)"
            raise ResourceError(f"{text}, or use --executor inline") from error
        self._capacity = Capacity(lambda: [node["Resources"] for node in _list_alive_nodes()])
        self._running: dict[Any, Task] = {}  # object reference -> its task

        def kvlab_trial(task: Task) -> Any:  # Ray names worker processes after the function
            with stop_at_sigterm():
                return run(task)

        # A worker that used a GPU ends with its task, so that nothing of it stays in GPU memory.
        self._on_cpu = ray.remote(max_retries=0)(kvlab_trial)
        self._on_gpu = ray.remote(max_retries=0, num_gpus=1, max_calls=1)(kvlab_trial)

    @property
    def _where(self) -> str:
        return f"Ray at {self._address}" if self._address else "a local Ray cluster"

    def describe(self) -> str:
        gpus = f", {self._capacity.gpus:g} GPUs" if self._capacity.gpus else ""
        return f"{self._where}, {self._capacity.cpus:g} CPUs{gpus}"

    def check_requests(self, requests: Iterable[ResourcesConfig]) -> None:
        self._capacity.check_requests(requests)

    def has_room(self, resources: ResourcesConfig) -> bool:
        return self._capacity.has_room(resources, [t.resources for t in self._running.values()])

    def start(self, task: Task) -> None:
        resources = task.resources
        options: dict[str, Any] = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.devices,
            "accelerator_type": resources.accelerator_type,
            "name": f"kvlab trial {task.id}",
        }
        if self._capacity.gpus and not resources.devices:  # otherwise Ray exposes every GPU
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
        remote = self._on_gpu if resources.devices else self._on_cpu
        self._running[remote.options(**options).remote(task)] = task

    def wait(self, seconds: float) -> list[EndedTask]:
        if not self._running:
            return []
        pending = list(self._running)
        ready, _ = ray.wait(pending, num_returns=1, timeout=seconds)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        ended = [self._collect(reference) for reference in ready]
        if not all(map(_listens, self._daemons)):
            ended += self._reconnect()
        return ended

    def run_on_all_machines(self, function: Callable[[str], Any], argument: str) -> dict[str, Any]:
        references = {}
        remote = ray.remote(max_retries=2, num_cpus=0)(function)
        for node in _list_alive_nodes():
            if node["Resources"].get("CPU") or node["Resources"].get("GPU"):
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}"
                affinity = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                remote_there = remote.options(scheduling_strategy=affinity)
                references[f"{name}, node {node['NodeID'][:6]})"] = remote_there.remote(argument)
        results: dict[str, Any] = {}
        for name, reference in references.items():
            try:
                results[name] = ray.get(reference, timeout=ANSWER_SECONDS)
            except (*_LOST_MACHINE, ray.exceptions.TaskUnschedulableError):
                continue  # the machine has left the cluster meanwhile
            except ray.exceptions.GetTimeoutError:
                results[name] = ResourceError(f"no answer in {ANSWER_SECONDS:g} seconds")
            except ray.exceptions.RayError as error:
                results[name] = error
        return results

    def close(self, *, force: bool = False) -> None:
        if force and self._address and ray.is_initialized():
            for reference in self._running:
                ray.cancel(reference, force=True)
        self._disconnect()
        self._output_filter.close()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self._address is not None:
            _await_listener(self._address)
            context = ray.init(address=self._address, **quiet)
            self._daemons = _find_addresses(context, "raylet_socket_name")
            return
        # Ray would keep the token of a cluster in HOME, which may not be writable, and announce it
        os.environ.setdefault("RAY_AUTH_TOKEN", _TOKEN)
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        for attempts_left in reversed(range(START_ATTEMPTS)):
            self._reaper = Reaper()
            try:
                context = ray.init(
                    address="local",
                    num_cpus=cpu_count(),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=self._reaper.folder,
                    # Ray would start worker processes before it answers, and never answer, nor
                    # heed Ctrl-C, if one of them died or took over a minute (Ray issue 40131).
                    _system_config={"prestart_worker_first_driver": False},
                    **quiet,
                )
            except Exception as error:
                if not attempts_left or "timed out during startup" not in str(error):
                    raise
                self._disconnect()
            else:
                self._daemons = _find_addresses(context, "raylet_socket_name", "gcs_address")
                return

    def _disconnect(self) -> None:
        with contextlib.redirect_stdout(None):  # suppress Ray's shutdown output
            ray.shutdown()
        if self._reaper is not None:
            self._reaper.close()

    def _reconnect(self) -> list[EndedTask]:
        """Start another local cluster, or connect to the named one again.

        Returns:
            The tasks that ran, all of which have died.

        Raises:
            ClusterLost: The cluster is unavailable.
        """
        self._disconnect()
        death = WorkerKilled("its cluster died")
        lost = [EndedTask(task.id, error=death) for task in self._running.values()]
        self._running.clear()
        try:
            self._connect()
        except Exception as error:
            text = f"{self._where} is lost ({summarize_error(error)}); the recorded results are not"
            raise ClusterLost(f"{text}; submit again when it is back") from error
        return lost

    def _collect(self, reference: Any) -> EndedTask:
        """Return how a task has ended."""
        task = self._running.pop(reference)
        cause: BaseException
        try:
            return EndedTask(task.id, outcome=ray.get(reference))
        except ray.exceptions.OutOfMemoryError:
            text = "the machine's memory ran out, and Ray ended the trial"
            cause = MemoryError(f"{text}; run fewer at once, or smaller")
        except _WORKER_DEATHS as error:
            cause = WorkerKilled(f"its process died ({type(error).__name__})")
        except ray.exceptions.RayError as error:
            raised = getattr(error, "cause", None)  # of a RayTaskError
            known = StoreError | WorkerKilled | CodeChanged
            cause = raised if isinstance(raised, known) else error
        return EndedTask(task.id, error=cause)


class _RayOutputFilter:
    """Drop what Ray's threads print to standard output. kvlab reports a dead worker itself."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _await_listener(address: str) -> None:
    """Wait until something listens at ``HOST:PORT``; names such as ``auto`` are Ray's to find.

    Raises:
        OSError: The host is not known, or nothing listens in time.
    """
    host_port = address.removeprefix("ray://")
    host, _, port = host_port.rpartition(":")
    ends, waits = time.monotonic() + LISTENER_SECONDS, False
    while host and port.isdigit():
        try:
            _touch(host_port, seconds=5)
            return
        except socket.gaierror:
            raise
        except OSError as error:
            if time.monotonic() >= ends:
                text = f"nothing has listened there for {LISTENER_SECONDS:g} s"
                raise ConnectionError(f"{text} ({error.strerror or error})") from None
            if not waits:
                text = f"nothing listens at {address} yet; waiting for {LISTENER_SECONDS:g} s"
                print(text, file=sys.stderr, flush=True)
        waits = True
        time.sleep(0.5)


def _find_addresses(context: Any, *names: str) -> list[str]:
    """Return where parts of a cluster listen; nothing for a client (``ray://``)."""
    addresses = getattr(context, "address_info", {})
    return [addresses[name] for name in names if name in addresses]


def _listens(address: str) -> bool:
    """Return whether a process listens at a path or at ``HOST:PORT``."""
    try:
        if address.startswith("/"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(address)
        else:
            _touch(address, seconds=1)
    except OSError as error:  # another kind is that of a busy process
        return not isinstance(error, ConnectionRefusedError | FileNotFoundError)
    return True


def _touch(address: str, seconds: float) -> None:
    """Connect to ``HOST:PORT`` and close the connection."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _list_alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]
