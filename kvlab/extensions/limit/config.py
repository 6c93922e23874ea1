"""`benchmark.memory` of an experiment, and the part `limit`."""

from typing import TYPE_CHECKING

from kvlab.spec.measure_options import MeasureEntry
from kvlab.spec.spec_model import PositiveInt, Problems, SpecModel

if TYPE_CHECKING:
    from kvlab.spec.experiment import Experiment


class LimitFields(SpecModel):
    """What `benchmark` gets."""

    omitted_defaults = frozenset({"memory"})

    memory: PositiveInt | None = None
    """Bytes that the part limit may use, which finds the largest batch that fits, by trying; on CPU
    it needs them.
    Unit: bytes. Default: the device's. Example: 8e9, parts: [limit]"""


def find_problems(experiment: "Experiment") -> Problems:
    """Yield whether one of the part and its memory is there without the other."""
    asks = "limit" in experiment.benchmark.parts
    memory = LimitFields.of(experiment.benchmark).memory
    if memory is not None and not asks:
        text = "is read only by the part limit; add limit to parts, or remove it"
        yield "benchmark.memory", text
    if memory is None and asks and not experiment.resources.devices:
        text = "is missing, and on CPU limit needs it; give bytes, such as 8e9"
        yield "benchmark.memory", text


MEASURE = MeasureEntry(
    "kvlab.extensions.limit.measure", "the largest batch that fits, by trying", "parts",
    memory_key="memory", added_by="limit", example="bench gpt2 --only limit --limit 4GiB",
)  # fmt: skip
