"""What a cache costs and buys when decoding: exact bytes, peak memory, latency, throughput."""

from kvlab.benchmark.measure import benchmark

__all__ = ["benchmark"]
