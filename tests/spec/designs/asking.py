"""Axes for the tests of designs: factors a, b, c, ... with levels a0, a1, ..."""

from kvlab.spec.design import Axis, DesignRequest


def asked(*sizes: int, **options) -> DesignRequest:
    axes = tuple(
        Axis((name,), tuple({name: f"{name}{level}"} for level in range(size)))
        for name, size in zip("abcdefghij", sizes, strict=False)
    )
    target = tuple(size - 1 if size <= 2 else None for size in sizes)
    return DesignRequest(axes, **{"target": target, **options})
