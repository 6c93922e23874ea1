"""Requests to designs: factors a, b, ... with levels a0, a1, ..., of which a0 is the baseline."""

from typing import Any

from kvlab.spec.designs import DesignRequest


def make_request(*sizes: int, **options: Any) -> DesignRequest:
    """Return a request for factors of ``sizes`` levels; ``options`` are further fields of it."""
    named = zip("abcdefghij", sizes, strict=False)
    factors = {name: [f"{name}{level}" for level in range(size)] for name, size in named}
    target = tuple(size - 1 if size <= 2 else None for size in sizes)
    return DesignRequest(factors, **{"target": target, **options})
