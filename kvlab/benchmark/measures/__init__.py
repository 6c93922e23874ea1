"""The measures of the benchmark, one module each.

A module has ``measure(session)``, which yields `Measurement`s and reports through
`Session.on_notice` what cannot be measured here, and ``TABLES``, which says how `kvlab bench`
prints them. Where trials record numbers of it, ``metrics(lines, config)`` returns them by the names
of `kvlab.store.metrics`. The table is `kvlab.spec.benchmark_config.MEASURES`.
"""
