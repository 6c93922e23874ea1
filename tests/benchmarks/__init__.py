"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.benchmarks import (
    comparisons,
    decode,
    driver,
    harness,
    past,
    report,
    roofline,
    tokenising,
    training,
)

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode.run,
    "past": past.run,
    "comparisons": comparisons.run,
    "roofline": roofline.run,
    "training": training.run,
    "tokenising": tokenising.run,
    "harness": harness.run,
    "report": report.run,
    "driver": driver.run,
}
