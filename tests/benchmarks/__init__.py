"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.benchmarks import decode, report

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode.run,
    "report": report.run,
}
