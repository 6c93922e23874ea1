"""What the cache buys in time."""

from collections.abc import Mapping


def cache_speedup(measured: Mapping[str, float]) -> float | None:
    """Time per output token without a cache over the time with it, both medians at batch 1."""
    without, cached = measured.get("tpot_ms_uncached_p50"), measured.get("tpot_ms_p50")
    return without / cached if without and cached else None
