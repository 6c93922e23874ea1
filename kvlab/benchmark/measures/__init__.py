"""The measures of the benchmark, one module each.

A module has ``measure(session)``, which yields `Measurement`s, and ``TABLES``, which says how
`kvlab bench` prints them. The table of measures is `kvlab.spec.benchmark_config.MEASURES`.
"""
