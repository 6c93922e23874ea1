"""Runs trials as Ray tasks. The only module that imports ray, but for `kvlab.trial.ddp`.

Without an address it starts a local cluster of its own, which ends with this process. Ray
retries nothing: ``max_retries=0`` also keeps it from running a trial again after the host's
memory ran out. Nothing is reported to anybody outside.
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from kvlab.errors import ClusterLost, ResourceError, StoreError, WorkerLost
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors.capacity import Capacity, cpu_count
from kvlab.sweep.executors.executor import EndedTask, RunTask, WorkerKilled
from kvlab.sweep.executors.reaper import Reaper
from kvlab.trial.run import Outcome
from kvlab.trial.task import Task

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

OBJECT_STORE_BYTES = 80 * 2**20
"""Nearly the least that Ray takes: trials pass a configuration in and a word out."""

ANSWER_SECONDS = 90.0
"""For a machine to start a process and answer a question."""

_WORKER_DEATHS = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ObjectLostError,
)


_TOKEN = secrets.token_hex(32)

_NODE_DEATHS = (
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.TaskUnschedulableError,
)


class RayExecutor:
    """Trials as tasks of a Ray cluster.

    Args:
        run: the work; it travels to the workers once.
        address: of a running cluster, such as ``auto`` or ``ray://host:10001``; None starts one.

    Raises:
        ResourceError: the cluster cannot be reached or started.

    A raylet is what a process reaches its cluster through. Should this process's own die, a
    cluster of its own is begun again, and one that was named is connected to again; what ran
    has died, and its trials are started again as after any other death.
    """

    def __init__(self, run: RunTask, address: str | None = None):
        self._address = address
        self._reaper: Reaper | None = None
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(contextlib.redirect_stdout(_RayOutputFilter(sys.stdout)))
        try:
            self._connect()
        except Exception as error:
            self.close(force=True)
            where = f"address = {address}" if address else "a local Ray cluster"
            text = f"{where} cannot be used: {_first_line(error)}; check it"
            if address and "RAY_AUTH_MODE" not in os.environ:
                text += " (one that asks for a token needs RAY_AUTH_MODE=token here)"
            raise ResourceError(f"{text}, or use --executor inline") from error
        self._capacity = Capacity(_list_machines)
        self._running: dict[Any, Task] = {}

        def kvlab_trial(task: Task) -> Outcome:
            return run(task)

        # A worker that used a GPU ends with its trial: nothing of it stays in GPU memory.
        self._on_cpu = ray.remote(max_retries=0)(kvlab_trial)
        self._on_gpu = ray.remote(max_retries=0, num_gpus=1, max_calls=1)(kvlab_trial)

    def describe(self) -> str:
        where = f"Ray at {self._address}" if self._address else "a local Ray cluster"
        gpus = f", {self._capacity.gpus:g} GPUs" if self._capacity.gpus else ""
        return f"{where}, {self._capacity.cpus:g} CPUs{gpus}"

    def check(self, requests: Iterable[ResourcesConfig]) -> None:
        self._capacity.check(requests)

    def has_room(self, resources: ResourcesConfig) -> bool:
        return self._capacity.has_room(resources)

    def start(self, task: Task) -> None:
        resources = task.resources
        options: dict[str, Any] = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.devices,
            "name": f"kvlab trial {task.id}",
        }
        if (
            self._capacity.gpus and not resources.devices
        ):  # Ray would show it every GPU of the machine
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
        function = self._on_gpu if resources.devices else self._on_cpu
        self._running[function.options(**options).remote(task)] = task
        self._capacity.take(resources)

    def wait(self, seconds: float) -> list[EndedTask]:
        if not self._running:
            return []
        pending = list(self._running)
        ready, _ = ray.wait(pending, num_returns=1, timeout=seconds)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        ended = [self._ended(reference) for reference in ready]
        if any(isinstance(one.error, WorkerKilled) for one in ended) and self._is_cut_off():
            ended += self._begin_again()
        return ended

    def on_every_machine(
        self, task: Callable[[str], str], argument: str
    ) -> dict[str, str | Exception]:
        asked = {}
        remote = ray.remote(max_retries=2, num_cpus=0)(task)
        for node in _list_alive_nodes():
            if node["Resources"].get("CPU") or node["Resources"].get("GPU"):
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}"
                place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                there = remote.options(scheduling_strategy=place)
                asked[f"{name}, node {node['NodeID'][:6]})"] = there.remote(argument)
        found: dict[str, str | Exception] = {}
        for name, reference in asked.items():
            try:
                found[name] = ray.get(reference, timeout=ANSWER_SECONDS)
            except _NODE_DEATHS:
                continue  # the machine died meanwhile: it is no part of the cluster any more
            except ray.exceptions.GetTimeoutError:
                found[name] = ResourceError(f"no answer in {ANSWER_SECONDS:g} seconds")
            except ray.exceptions.RayError as error:
                found[name] = error
        return found

    def close(self, *, force: bool = False) -> None:
        if force and self._address and ray.is_initialized():
            for reference in self._running:
                ray.cancel(reference, force=True)
        if ray.is_initialized():
            with contextlib.redirect_stdout(None):  # its last words, from this thread
                ray.shutdown()
        if self._reaper is not None:
            self._reaper.close()
        self._quiet.close()

    def _is_cut_off(self) -> bool:
        """Whether this process's own raylet is dead: then no task will ever run again."""
        if not self._raylet:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self._raylet)
            except (ConnectionRefusedError, FileNotFoundError):
                return True
        return False

    def _begin_again(self) -> list[EndedTask]:
        """Another cluster of our own, or the way back into the one that was named.

        Returns:
            What ran: all of it has died.

        Raises:
            ClusterLost: there is no way back.
        """
        with contextlib.redirect_stdout(None):
            ray.shutdown()
        if self._reaper is not None:
            self._reaper.close()
        lost = [
            EndedTask(task.id, error=WorkerKilled("its cluster died (LocalRayletDiedError)"))
            for task in self._running.values()
        ]
        for task in self._running.values():
            self._capacity.give_back(task.resources)
        self._running.clear()
        try:
            self._connect()
        except Exception as error:
            where = f"Ray at {self._address}" if self._address else "the local Ray cluster"
            text = f"{where} is lost ({_first_line(error)}); nothing that was recorded is"
            raise ClusterLost(f"{text}; submit again when it is back") from error
        return lost

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self._address is not None:
            self._raylet = _raylet_socket(ray.init(address=self._address, **quiet))
            return
        self._reaper = Reaper()
        _set_token()
        context = ray.init(
            address="local",
            num_cpus=cpu_count(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=self._reaper.folder,
            **quiet,
        )
        self._raylet = _raylet_socket(context)

    def _ended(self, reference: Any) -> EndedTask:
        task = self._running.pop(reference)
        self._capacity.give_back(task.resources)
        try:
            return EndedTask(task.id, outcome=ray.get(reference))
        except ray.exceptions.OutOfMemoryError:
            text = "the machine's memory ran out, and Ray ended the trial"
            return EndedTask(task.id, error=MemoryError(f"{text}; run fewer at once, or smaller"))
        except _WORKER_DEATHS as error:
            text = f"its process died ({type(error).__name__})"
            return EndedTask(task.id, error=WorkerKilled(text))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WorkerLost):
                return EndedTask(task.id, error=WorkerKilled(str(error.cause)))
            cause = error.cause if isinstance(error.cause, StoreError) else error
            return EndedTask(task.id, error=cause)
        except ray.exceptions.RayError as error:
            return EndedTask(task.id, error=error)


class _RayOutputFilter:
    """Standard output without what Ray's threads print over it: a dead worker is told once, by us.

    Everybody else's output passes.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _raylet_socket(context: Any) -> str:
    """The socket of the raylet that this process talks to; empty for a client (``ray://``)."""
    return str(getattr(context, "address_info", {}).get("raylet_socket_name") or "")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _list_machines() -> list[dict[str, float]]:
    """What each living machine of the cluster offers."""
    return [node["Resources"] for node in _list_alive_nodes()]


def _list_alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _set_token() -> None:
    """Only this process and its workers may talk to the cluster.

    A local cluster asks for a token, which Ray would keep in HOME: it may not be writable, and
    the environment does as well. One token serves all clusters of this process: Ray reads it once.
    """
    os.environ.setdefault("RAY_AUTH_TOKEN", _TOKEN)
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it says so
