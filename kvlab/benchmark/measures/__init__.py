"""The parts of a benchmark, in order: name -> module with ``measure(session)``.

A new one is a file, a line here, its name in `kvlab.benchmark.measurement.PartName`, and a test.
Modules are named, not imported: `kvlab bench --help` stays instant.
"""

MEASURES: dict[str, tuple[str, str]] = {
    "memory": (
        "kvlab.benchmark.measures.decode_memory",
        "KV bytes in every way, and the peak by what it is",
    ),
    "latency": (
        "kvlab.benchmark.measures.decode_latency",
        "first token by prompt, each token by context",
    ),
    "throughput": ("kvlab.benchmark.measures.decode_throughput", "tokens each second by batch"),
    "limit": ("kvlab.benchmark.measures.max_batch", "the largest batch that fits, by trying"),
    "task": (
        "kvlab.benchmark.measures.generation_task",
        "the RTX 4090 article's task, in tasks each second",
    ),
    "roofline": (
        "kvlab.benchmark.measures.decode_roofline",
        "measured times beside the device's ceilings",
    ),
    "energy": ("kvlab.benchmark.measures.decode_energy", "joules a token, where the device tells"),
    "projection": ("kvlab.benchmark.measures.size_projection", "the same layouts at other sizes"),
    "articles": (
        "kvlab.benchmark.measures.article_numbers",
        "the articles' numbers beside the right ones",
    ),
}
"""Name -> (module, one line)."""

DEFAULT_MEASURES = ("memory", "latency", "throughput", "roofline", "energy")
"""What is measured if nothing is asked for; the others need more time or more to know."""
