"""The contract of a benchmark's parts. The members are in ``parts/``, one file each."""

from collections.abc import Callable, Iterator

from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.session import Session

Part = Callable[[Session], Iterator[Measurement]]
"""Measures and yields lines. What it cannot measure here it tells through `Session.say`."""
