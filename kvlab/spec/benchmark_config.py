"""`benchmark` of an experiment, and the table of measures that it and `kvlab bench` choose from."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from kvlab.own_extensions import extend, find_members
from kvlab.spec.measure_options import MeasureEntry, MeasureOptions
from kvlab.spec.spec_model import OneOf, PositiveInt, SpecModel, TupleOf, once

TASK_PROMPT_TOKENS = 256
"""Tokens of the prompt of one task."""

TASK_TOKENS = 2 * TASK_PROMPT_TOKENS
"""Tokens of one task: those of the prompt, and as many sampled."""


_FOLDER = "kvlab.benchmark.measures"

MEASURES: dict[str, MeasureEntry] = {
    "memory": MeasureEntry(
        f"{_FOLDER}.decode_memory", "KV bytes in every way, and the peak by what it is", "always",
        is_default=True,
    ),
    "latency": MeasureEntry(
        f"{_FOLDER}.decode_latency", "first token by prompt, each token by context", "always",
        is_default=True, is_timed=True,
    ),
    "throughput": MeasureEntry(
        f"{_FOLDER}.decode_throughput", "tokens each second by batch", "always",
        is_default=True, per_batch=True, is_timed=True,
    ),
    **find_members("measures"),
    "task": MeasureEntry(
        f"{_FOLDER}.generation_task", "the RTX 4090 article's task, in tasks each second", "parts",
        added_by="text", per_batch=True, is_timed=True,
        example="bench gpt2 --only task --text moby-dick.txt",
    ),
    "roofline": MeasureEntry(
        f"{_FOLDER}.decode_roofline", "measured times beside the device's ceilings", "key",
        is_default=True, per_batch=True, is_timed=True,
    ),
}  # fmt: skip
"""Name -> measure, in the order of `kvlab bench`: the one table of measures."""


def list_measures(in_trials: str) -> tuple[str, ...]:
    """Return the measures that trials take always, by `parts` or by a key of their own."""
    return tuple(name for name, entry in MEASURES.items() if entry.in_trials == in_trials)


Part = Annotated[str, OneOf(lambda: list_measures("parts"))]


@extend("benchmark")
class BenchmarkConfig(SpecModel):
    """`benchmark`: memory and decode speed on random tokens."""

    excluded_from_identity = frozenset({"retime"})
    omitted_defaults = frozenset({"parts", "seconds"})

    prompt_tokens: PositiveInt = 64
    """Prompt of the timed sequences; less where a short block_size leaves no room.
    Unit: tokens. Example: 256"""
    new_tokens: PositiveInt = 32
    """Tokens decoded after the prompt; at most half of a short block_size.
    Unit: tokens. Example: 64"""
    batch_sizes: Annotated[TupleOf[PositiveInt], Field(min_length=1)] = (1,)
    """Batches whose throughput is measured; tokens_per_second is that of the largest.
    Unit: sequences. Example: [1, 8, 32]"""
    repeats: Annotated[PositiveInt, Field(le=1000)] = 3
    """Timed runs at least, after one warm-up. More follow, up to five times as many, where the
    median is not known to 5% yet and `seconds` are not over.
    Unit: runs. Example: 5"""
    seconds: Annotated[float, Field(gt=0, le=86400)] = 0.5
    """At one context or batch: no run beyond `repeats` begins after this.
    Unit: seconds. Example: 2"""
    context_lengths: TupleOf[PositiveInt] = ()
    """Further prompt lengths at which latency is measured. Unit: tokens. Example: [128, 512]"""
    roofline: bool = False
    """Compare with this device's ceilings, measured once for it. Example: true"""
    parts: Annotated[TupleOf[Part], once("one")] = ()
    """Further parts, such as task, 256 tokens of the trial's own text and 256 sampled, by batch.
    Example: [task]"""
    retime: Literal["auto", "never"] = "auto"
    """Where the times of a sweep's trials do not compare, as these ran side by side, auto times all
    of them again at its end, alone and in turns. never keeps the first times, which are not judged.
    Example: never"""

    def list_options(self) -> Iterator[tuple[str, MeasureOptions]]:
        """Yield the measures whose own keys are set, and these keys."""
        for name in list_measures("key"):
            if isinstance(options := getattr(self, name), MeasureOptions):
                yield name, options

    def identity(self) -> dict[str, Any]:
        """Return the fields that say what is computed; the order of ``parts`` does not."""
        data = super().identity() | {name: one.identity() for name, one in self.list_options()}
        return {**data, "parts": sorted(self.parts)} if self.parts else data
