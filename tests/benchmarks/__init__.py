"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.benchmarks import decode, driver

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {"decode": decode.run, "driver": driver.run}
