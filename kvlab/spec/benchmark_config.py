"""`benchmark` of an experiment."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvlab.spec.spec_model import PositiveInt, SpecModel, raise_problems

TASK_TOKENS = 512
"""Of the task: 256 are read and 256 sampled."""

DEFAULT_SECONDS = 0.5


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class BenchmarkConfig(SpecModel):
    """`benchmark`: memory and decode speed on random tokens."""

    prompt_tokens: PositiveInt = 64
    new_tokens: PositiveInt = 32
    batch_sizes: Annotated[
        tuple[PositiveInt, ...], BeforeValidator(_tuple), Field(min_length=1)
    ] = (1,)
    repeats: PositiveInt = Field(
        default=3,
        le=1000,
        description="Timed runs at least, after one warm-up. More follow, up to five times as"
        " many, where the median is not known to 5% yet and `seconds` are not over.",
    )
    seconds: Annotated[float, Field(gt=0, le=86400)] = Field(
        default=DEFAULT_SECONDS,
        description="At one context or batch: no run beyond `repeats` begins after this.",
    )
    context_lengths: Annotated[tuple[PositiveInt, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="Further prompt lengths at which latency is measured."
    )
    roofline: bool = Field(
        default=False, description="Compare with this device's ceilings, measured once for it."
    )
    parts: Annotated[tuple[Literal["limit", "task", "energy"], ...], BeforeValidator(_tuple)] = (
        Field(
            default=(),
            description="Further parts: limit, the largest batch that fits, by trying; task, 256"
            " tokens of the trial's own text and 256 sampled, by batch; energy, where the device"
            " counts it.",
        )
    )
    memory: PositiveInt | None = Field(
        default=None, description="Bytes that limit may use; on CPU it needs them."
    )

    @model_validator(mode="after")
    def _check(self) -> "BenchmarkConfig":
        problems = []
        if len(set(self.parts)) < len(self.parts):
            problems.append(("parts", "names one twice; name each once"))
        if self.memory is not None and "limit" not in self.parts:
            problems.append(("memory", "is what limit may use; add limit to parts, or remove it"))
        raise_problems(problems)
        return self

    def identity(self) -> dict[str, Any]:
        """As of every part; but what came later enters only where it is asked for, so that the
        ids of earlier results stay as they were."""
        data = super().identity()
        data["parts"] = sorted(self.parts)
        for name, default in (("parts", []), ("memory", None), ("seconds", DEFAULT_SECONDS)):
            if data[name] == default:
                del data[name]
        return data
