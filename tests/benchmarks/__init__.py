"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.benchmarks import decode, training

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode.run,
    "training": training.run,
}
