"""The benchmarks, by name."""

from collections.abc import Callable, Iterator

from tests.performance import (
    context_length,
    conversation_reuse,
    decode_speed,
    hellaswag_speed,
    int8_training,
    orchestration,
    report_speed,
    roofline_accuracy,
    stored_forms,
    tokenization,
    training_speed,
)

BENCHMARKS: dict[str, Callable[[], Iterator[str]]] = {
    "decode": decode_speed.run,
    "context-length": context_length.run,
    "conversations": conversation_reuse.run,
    "roofline": roofline_accuracy.run,
    "training": training_speed.run,
    "forms": stored_forms.run,
    "int8": int8_training.run,
    "tokenization": tokenization.run,
    "hellaswag": hellaswag_speed.run,
    "report": report_speed.run,
    "orchestration": orchestration.run,
}
