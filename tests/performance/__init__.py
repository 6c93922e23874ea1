"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.performance import (
    decode_speed,
    hellaswag_speed,
    orchestration,
    report_speed,
    roofline_accuracy,
    tokenization,
    training_speed,
)

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode_speed.run,
    "roofline": roofline_accuracy.run,
    "training": training_speed.run,
    "tokenization": tokenization.run,
    "hellaswag": hellaswag_speed.run,
    "report": report_speed.run,
    "orchestration": orchestration.run,
}
