"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.benchmarks import decode, tokenising, training

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode.run,
    "tokenising": tokenising.run,
    "training": training.run,
}
