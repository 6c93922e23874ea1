"""Requests to designs: axes a, b, c, ... with levels a0, a1, ..., of which a0 is the baseline."""

from typing import Any

from kvlab.spec.designs import Axis, DesignRequest


def make_request(*sizes: int, **options: Any) -> DesignRequest:
    """Return a request for axes of ``sizes`` levels; ``options`` are further fields of it."""
    axes = tuple(
        Axis((name,), tuple({name: f"{name}{level}"} for level in range(size)))
        for name, size in zip("abcdefghij", sizes, strict=False)
    )
    target = tuple(size - 1 if size <= 2 else None for size in sizes)
    return DesignRequest(axes, **{"target": target, **options})
