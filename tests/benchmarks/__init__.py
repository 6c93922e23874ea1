"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.benchmarks import decode, roofline

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode.run,
    "roofline": roofline.run,
}
