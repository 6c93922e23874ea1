"""Designs of factors a, b, c, ... with levels a0, a1, ..., of which a0 is the baseline."""

from typing import Any

from kvlab.spec.designs import DESIGNS, DesignRequest


def make_request(*sizes: int, **options: Any) -> DesignRequest:
    """Return a request for factors of ``sizes`` levels; ``options`` are further fields of it."""
    named = zip("abcdefghij", sizes, strict=False)
    factors = {name: [f"{name}{level}" for level in range(size)] for name, size in named}
    return DesignRequest(factors, **{"targets": {}, **options})


def list_positions(name: str, request: DesignRequest) -> list[tuple[int, ...]]:
    """Return the cells of a design, each as the position of its level in every factor."""
    return [
        tuple(
            levels.index(cell.get(factor, levels[0])) for factor, levels in request.factors.items()
        )
        for cell in DESIGNS[name].cells(request)
    ]
