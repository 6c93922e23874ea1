"""One line of `kvlab bench --json`, and of the ``benchmark`` list in a trial's result.

The schema is stable: a field may be added, none changes its meaning. `kvlab schema measurement`
prints it. Imports no torch, so that reports can read it.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from kvlab.spec.spec_model import SpecModel

PartName = Literal[
    "memory", "latency", "throughput", "task", "limit", "roofline", "energy", "projection",
    "articles",
]  # fmt: skip


class Quantile(SpecModel):
    """A quantile of the samples with its 95% interval, by bootstrap over the rounds."""

    q: float = Field(description="0.5, 0.95 or 0.99.")
    value: float
    low: float
    high: float


class Measurement(SpecModel):
    """One number, what it is of, and how far it can be trusted."""

    schema_version: Literal[1] = 1
    part: PartName = Field(description="Which part of the benchmark measured it.")
    metric: str = Field(description="What it is; kvlab/benchmark/README.md lists all.")
    variant: str = Field(description="The model and what was changed of it.")
    value: float | int | None = Field(description="The number; null if it cannot be had here.")
    unit: str = Field(description="s, bytes, tokens/s, tasks/s, FLOPs, J/token, or empty.")
    exact: bool = Field(default=False, description="Computed or counted, without any error.")
    device: str | None = None
    dtype: str | None = Field(default=None, description="Of the weights.")
    kv_dtype: str | None = Field(default=None, description="Of the stored K/V.")
    batch_size: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    context_length: int | None = Field(
        default=None, description="Tokens of each sequence at the last step that is measured."
    )
    cached: bool | None = Field(default=None, description="False: the whole text at every step.")
    quantiles: list[Quantile] = Field(default=[], description="Of times; value is the median.")
    samples: int | None = Field(default=None, description="Times measured.")
    rounds: int | None = Field(default=None, description="Turns in which they were measured.")
    relative_error: float | None = Field(
        default=None, description="Half the 95% interval of the median, as a share of it."
    )
    noisy: bool | None = Field(default=None, description="True: do not quote it; see note.")
    against: str | None = Field(
        default=None, description="Of a ratio or a claim: the variant or article it is against."
    )
    low: float | None = Field(default=None, description="Lower end of value's interval.")
    high: float | None = None
    verdict: Literal["same", "faster", "slower", "undecided", "memory", "compute"] | None = Field(
        default=None, description="Of a comparison, or which ceiling bounds a step."
    )
    least_found: float | None = Field(
        default=None,
        description="Of a comparison: the smallest difference, as a share, that would have been"
        " found in 95 of 100 cases.",
    )
    note: str = ""


# When a time, and a comparison of two, is known well enough. Imports nothing: options read it.


RATIO_PRECISION = 0.02
"""A ratio whose 99% interval reaches no further than this to either side is settled: then equal
variants are called the same, and a difference of 5% is found in nearly every case."""


@dataclass(frozen=True)
class StopRule:
    """Rounds go on until every median is known to ``relative_error`` and every comparison with
    the first variant is settled, at least ``least`` of them, at most ``most``, and none is begun
    after ``seconds``.

    With ``least`` = ``most`` the number of rounds is fixed.
    """

    relative_error: float = 0.05
    least: int = 5
    most: int = 200
    seconds: float = 120.0
