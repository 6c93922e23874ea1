"""A variant beside the first one, as a line of the benchmark."""

from collections.abc import Iterator
from typing import Any

from kvlab.benchmark.interleave import Timed
from kvlab.benchmark.measurement import Measurement, PartName
from kvlab.benchmark.samples import compare
from kvlab.benchmark.session import Session


def comparisons(
    session: Session, part: PartName, metric: str, series: str, timed: Timed[str], **place: Any
) -> Iterator[Measurement]:
    """How long each further variant takes as a multiple of the first; nothing of a variant that
    was not timed, or in too few rounds.

    Args:
        place: fields of the lines, such as the batch size.
    """
    base, *others = (v for v in session.variants if (v.name, series) in timed.samples)
    for variant in others:
        found = compare(timed.samples[variant.name, series], timed.samples[base.name, series])
        if found is None:
            continue
        note = ""
        if found.verdict == "undecided":
            note = f"not told apart; {found.least_found:.0%} or more would have been found"
        yield session.line(
            part,
            metric,
            variant,
            found.ratio,
            "",
            against=base.name,
            low=found.low,
            high=found.high,
            verdict=found.verdict,
            least_found=found.least_found,
            note=note,
            **place,
        )
