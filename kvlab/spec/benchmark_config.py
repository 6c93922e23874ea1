"""`benchmark` of an experiment, and the table of measures that it and `kvlab bench` choose from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvlab.spec.conversations_config import ConversationsConfig
from kvlab.spec.spec_model import OneOf, PositiveInt, SpecModel, TupleOf, raise_problems

TASK_PROMPT_TOKENS = 256
"""Tokens of the prompt of one task."""

TASK_TOKENS = 2 * TASK_PROMPT_TOKENS
"""Tokens of one task: those of the prompt, and as many sampled."""

DEFAULT_SECONDS = 0.5


@dataclass(frozen=True)
class MeasureEntry:
    """One measure of the benchmark, as the spec and the command line know it.

    Attributes:
        module: has ``measure(session)``. It is named, not imported: specs and `kvlab bench
            --help` do not import torch.
        summary: one line of `kvlab bench --help`.
        in_trials: whether a trial always takes it, takes it if `benchmark.parts` names it, takes
            it if the key of this name is set (`benchmark.roofline`, `benchmark.conversations`), or
            never.
        is_default: whether `kvlab bench` takes it when none is named; the others need more time
            or more input.
        added_by: the option of `kvlab bench` that adds it, if there is one.
        reads: further options of `kvlab bench` that it reads, and that do not add it.
        per_batch: whether it decodes with every batch size, whose caches must fit at once.
        is_timed: whether other load on the machine changes its numbers, so that `benchmark.retime`
            takes it again.
    """

    module: str
    summary: str
    in_trials: Literal["always", "parts", "key", "never"] = "never"
    is_default: bool = False
    added_by: str | None = None
    reads: tuple[str, ...] = ()
    per_batch: bool = False
    is_timed: bool = False


MEASURES: dict[str, MeasureEntry] = {
    "memory": MeasureEntry(
        "kvlab.benchmark.measures.decode_memory",
        "KV bytes in every way, and the peak by what it is",
        "always",
        is_default=True,
    ),
    "latency": MeasureEntry(
        "kvlab.benchmark.measures.decode_latency",
        "first token by prompt, each token by context",
        "always",
        is_default=True,
        is_timed=True,
    ),
    "throughput": MeasureEntry(
        "kvlab.benchmark.measures.decode_throughput",
        "tokens each second by batch",
        "always",
        is_default=True,
        per_batch=True,
        is_timed=True,
    ),
    "limit": MeasureEntry(
        "kvlab.benchmark.measures.max_batch",
        "the largest batch that fits, by trying",
        "parts",
        added_by="limit",
    ),
    "task": MeasureEntry(
        "kvlab.benchmark.measures.generation_task",
        "the RTX 4090 article's task, in tasks each second",
        "parts",
        added_by="text",
        per_batch=True,
        is_timed=True,
    ),
    "roofline": MeasureEntry(
        "kvlab.benchmark.measures.decode_roofline",
        "measured times beside the device's ceilings",
        "key",
        is_default=True,
        per_batch=True,
        is_timed=True,
    ),
    "energy": MeasureEntry(
        "kvlab.benchmark.measures.decode_energy",
        "joules a token, where the device tells",
        "parts",
        is_default=True,
        per_batch=True,
        is_timed=True,
    ),
    "conversations": MeasureEntry(
        "kvlab.benchmark.measures.conversations",
        "what a prefix cache reuses between turns, by budget",
        "key",
        added_by="load",
        reads=("text",),
    ),
    "projection": MeasureEntry(
        "kvlab.benchmark.measures.size_projection",
        "the same layouts at other sizes",
        added_by="project",
        per_batch=True,
    ),
    "articles": MeasureEntry(
        "kvlab.benchmark.measures.article_numbers",
        "the articles' numbers beside the right ones",
        added_by="project",
    ),
}
"""Name -> measure, in the order of `kvlab bench`: the one table of measures."""


def list_measures(in_trials: str) -> tuple[str, ...]:
    """Return the measures that trials take always, by `parts`, by a key of their own or never."""
    return tuple(name for name, entry in MEASURES.items() if entry.in_trials == in_trials)


def _name_retiming(value: Any) -> Any:
    """Return the mode that a boolean stands for."""
    return {True: "always", False: "never"}[value] if isinstance(value, bool) else value


class BenchmarkConfig(SpecModel):
    """`benchmark`: memory and decode speed on random tokens."""

    excluded_from_identity: ClassVar[frozenset[str]] = frozenset({"retime"})
    omitted_defaults: ClassVar[Mapping[str, Any]] = {
        "parts": [],
        "memory": None,
        "conversations": None,
        "seconds": DEFAULT_SECONDS,
    }

    prompt_tokens: PositiveInt = Field(
        default=64,
        description="Prompt of the timed sequences.",
        examples=[256],
        json_schema_extra={"unit": "tokens"},
    )
    new_tokens: PositiveInt = Field(
        default=32,
        description="Tokens decoded after the prompt.",
        examples=[64],
        json_schema_extra={"unit": "tokens"},
    )
    batch_sizes: Annotated[TupleOf[PositiveInt], Field(min_length=1)] = Field(
        default=(1,),
        description="Batches whose throughput is measured; tokens_per_second is"
        " that of the largest.",
        examples=[[1, 8, 32]],
        json_schema_extra={"unit": "sequences"},
    )
    repeats: PositiveInt = Field(
        default=3,
        le=1000,
        description="Timed runs at least, after one warm-up. More follow, up to five times as"
        " many, where the median is not known to 5% yet and `seconds` are not over.",
        examples=[5],
        json_schema_extra={"unit": "runs"},
    )
    seconds: Annotated[float, Field(gt=0, le=86400)] = Field(
        default=DEFAULT_SECONDS,
        description="At one context or batch: no run beyond `repeats` begins after this.",
        examples=[2.0],
        json_schema_extra={"unit": "seconds"},
    )
    context_lengths: TupleOf[PositiveInt] = Field(
        default=(),
        description="Further prompt lengths at which latency is measured.",
        examples=[[128, 512]],
        json_schema_extra={"unit": "tokens"},
    )
    roofline: bool = Field(
        default=False,
        description="Compare with this device's ceilings, measured once for it.",
        examples=[True],
    )
    parts: TupleOf[Annotated[str, OneOf(lambda: list_measures("parts"))]] = Field(
        default=(),
        description="Further parts: limit, the largest batch that fits, by trying; task, 256"
        " tokens of the trial's own text and 256 sampled, by batch; energy, where the device"
        " counts it.",
        examples=[["energy"]],
    )
    memory: PositiveInt | None = Field(
        default=None,
        description="Bytes that limit may use; on CPU it needs them.",
        examples=[8e9],
        json_schema_extra={
            "unit": "bytes",
            "computed_default": "the device's",
            "given": {"parts": ["limit"]},
        },
    )

    conversations: ConversationsConfig | None = Field(
        default=None,
        description="A load of conversations, and what a prefix cache reuses between their turns.",
        examples=[{"turns": 4}],
        json_schema_extra={"computed_default": "none"},
    )
    retime: Annotated[
        Literal["auto", "always", "never"],
        BeforeValidator(
            _name_retiming, json_schema_input_type=Literal["auto", "always", "never"] | bool
        ),
    ] = Field(
        default="auto",
        description="Where the times of a sweep's trials do not compare, as these ran side by side,"
        " time all of them again at its end, alone and in turns. auto: if this takes under a tenth"
        " of the sweep's time. true and false mean always and never.",
        examples=["always"],
    )

    @model_validator(mode="after")
    def _check(self) -> "BenchmarkConfig":
        problems = []
        if len(set(self.parts)) < len(self.parts):
            problems.append(("parts", "names one twice; name each once"))
        if self.memory is not None and "limit" not in self.parts:
            problems.append(
                ("memory", "is read only by the part limit; add limit to parts, or remove memory")
            )
        raise_problems(problems)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the fields that say what is computed; the order of ``parts`` does not."""
        data = super().identity()
        if self.conversations is not None:
            data["conversations"] = self.conversations.identity()
        return {**data, "parts": sorted(self.parts)} if self.parts else data
