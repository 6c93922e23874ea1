"""One line of `kvlab bench --json`, and of the ``benchmark`` list in a trial's result.

The schema is stable: fields may be added, and none changes its meaning. `kvlab schema
measurement` prints it. This module imports no torch: the command line and reports read it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from kvlab.own_extensions import extend
from kvlab.spec.benchmark_config import MEASURES
from kvlab.spec.spec_model import OneOf, SpecModel

RATIO_PRECISION = 0.02
"""A ratio is settled when its 99% interval reaches no further than this share to either side.
Equal variants are then reported as the same, and a difference of 5% is nearly always detected."""


@dataclass(frozen=True)
class StopRule:
    """Decides how many rounds of a timing are run.

    Rounds continue until every median has a relative error of at most ``relative_error`` and
    every comparison with the first variant is settled. With ``min_rounds == max_rounds`` the
    number of rounds is fixed.

    Attributes:
        relative_error: half of the median's 95% interval, as a share of the median.
        min_rounds, max_rounds: bounds on the number of rounds.
        seconds: no round starts after this time.
    """

    relative_error: float = 0.05
    min_rounds: int = 5
    max_rounds: int = 200
    seconds: float = 120.0


class Quantile(SpecModel):
    """A quantile of the samples with its 95% interval, by bootstrap over the rounds."""

    q: float
    """0.5, 0.95 or 0.99."""
    value: float
    low: float
    high: float


@extend("measurement")
class Measurement(SpecModel):
    """One number, what it describes, and how reliable it is."""

    schema_version: Literal[1] = 1
    part: Annotated[str, OneOf(lambda: MEASURES)]
    """Which part of the benchmark measured it."""
    metric: str
    """What it is; kvlab/benchmark/README.md lists all."""
    variant: str
    """The model and the changes made to it."""
    value: float | int | None
    """The number; null if it is unavailable here."""
    unit: str
    """s, bytes, tokens/s, tasks/s, FLOPs, J/token, or empty."""
    exact: bool = False
    """Computed or counted, without any error."""
    device: str | None = None
    dtype: str | None = None
    """Of the weights."""
    kv_dtype: str | None = None
    """Of the stored K/V."""
    batch_size: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    context_length: int | None = None
    """Tokens of each sequence at the last step that is measured."""
    cached: bool | None = None
    """False: the whole text is computed again at every step."""
    quantiles: list[Quantile] = Field(default=[])
    """Of times; value is the median."""
    samples: int | None = None
    """Times measured."""
    rounds: int | None = None
    """Rounds in which they were measured."""
    relative_error: float | None = None
    """Half the 95% interval of the median, as a share of it."""
    noisy: bool | None = None
    """True: do not quote it; see note."""
    attention: str | None = None
    """Of times: the attention kernels that ran, torch's by its names."""
    read_slots: float | None = None
    """Of decode steps: K/V slots of a sequence that one reads, those of all layers together, the
    mean over the steps."""
    used_slots: float | None = None
    """Of decode steps: how many of them hold tokens."""
    against: str | None = None
    """Of a ratio: the variant it is against."""
    low: float | None = None
    """Lower end of value's interval."""
    high: float | None = None
    verdict: Literal["same", "faster", "slower", "undecided", "memory", "compute"] | None = None
    """Of a comparison, or which peak of the device bounds a step."""
    least_found: float | None = None
    """Of a comparison: the smallest difference, as a share, that would be detected in 95 of 100
    cases."""
    note: str = ""


Metrics = dict[str, float | int]
"""What a trial records of a measure, by the names of `kvlab.store.metrics`."""


def find_line(lines: Iterable[Measurement], metric: str, **fields: object) -> Measurement:
    """Return the first line of a metric that has a value, and these values of other fields."""
    return next(
        line
        for line in lines
        if line.metric == metric
        and line.value is not None
        and all(getattr(line, name) == value for name, value in fields.items())
    )


def find_value(lines: Iterable[Measurement], metric: str, **fields: object) -> float | int:
    """Return the value of `find_line`."""
    return find_line(lines, metric, **fields).value or 0


@dataclass(frozen=True)
class TableLayout:
    """How `kvlab bench` prints the lines of one measure: a row per variant and key.

    Attributes:
        title: printed above the table.
        keys: the fields of a `Measurement` that identify a row besides the variant -> header.
        columns: metric -> header. The suffix ``:uncached`` selects times without a cache and
            ``:p95`` a quantile.
        shares: metrics that are printed in percent.
    """

    title: str
    keys: Mapping[str, str]
    columns: Mapping[str, str]
    shares: Collection[str] = ()
