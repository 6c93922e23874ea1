"""The executors by name. Each is imported only when it is asked for."""

from collections.abc import Callable

from kvlab.sweep.executor import Executor, Run


def _ray(run: Run, address: str | None) -> Executor:
    from kvlab.sweep.executors.ray import RayExecutor

    return RayExecutor(run, address)


def _inline(run: Run, address: str | None) -> Executor:
    from kvlab.sweep.executors.inline import InlineExecutor

    assert address is None, "only a cluster has an address"
    return InlineExecutor(run)


EXECUTORS: dict[str, Callable[[Run, str | None], Executor]] = {"ray": _ray, "inline": _inline}
