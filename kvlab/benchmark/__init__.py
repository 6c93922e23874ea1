"""What a cache costs and buys when decoding: exact bytes, latency, throughput, limits, roofline.

Imports nothing, so that `measurement` can be read without torch; start at `measure` and `session`.
"""
