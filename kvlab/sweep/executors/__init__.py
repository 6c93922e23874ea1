"""The table of executors, by the name that ``--executor`` takes. Each is imported when used."""

from collections.abc import Callable

from kvlab.sweep.executors.executor import Executor, RunTask


def _make_ray(run: RunTask, address: str | None) -> Executor:
    from kvlab.sweep.executors.ray import RayExecutor

    return RayExecutor(run, address)


def _make_inline(run: RunTask, address: str | None) -> Executor:
    from kvlab.sweep.executors.inline import InlineExecutor

    assert address is None, "only a cluster has an address"
    return InlineExecutor(run)


EXECUTORS: dict[str, Callable[[RunTask, str | None], Executor]] = {
    "ray": _make_ray,
    "inline": _make_inline,
}
