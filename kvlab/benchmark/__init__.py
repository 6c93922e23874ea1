"""Measure what a KV cache costs and saves when decoding: bytes, latency, throughput, limits.

This module imports nothing, so that `kvlab.benchmark.measurement` can be read without torch.
Start reading at `kvlab.benchmark.benchmark_stage` and `kvlab.benchmark.session`.
"""
