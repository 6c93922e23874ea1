"""The measures of the benchmark, one module each with ``measure(session)``.

Their table is `kvlab.spec.benchmark_config.MEASURES`.
"""
