"""Times that compare: what else ran while trials were timed, and in which order they were timed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.humanize import format_count
from kvlab.store.metrics import METRICS

_TIME_UNITS = ("ms", "tokens/s", "times")


def is_time(metric: str) -> bool:
    """Return whether a metric depends on what else a machine did."""
    return METRICS[metric].unit in _TIME_UNITS


def is_training_rate(metric: str) -> bool:
    """Return whether a metric is a time of the training, which is not taken again."""
    return is_time(metric) and metric.startswith("training_")


def is_timed_again(row: TrialRow) -> bool:
    """Return whether a trial was timed again, with nothing else on the machine."""
    return "timing" in row.record


def is_shared(row: TrialRow) -> bool:
    """Return whether something else used the device, or its cores, while a trial was timed."""
    provenance = row.record["provenance"]
    return not is_timed_again(row) and bool(provenance.get("timings") == "shared")


def without_second_times(row: TrialRow) -> TrialRow:
    """Return a row as if its trial had not been timed again."""
    return replace(row, record={k: v for k, v in row.record.items() if k != "timing"})


def describe_shared_timings(rows: Iterable[TrialRow]) -> str:
    """Say how many trials were timed while something else ran; empty if none were.

    Such times say less about their cell. Results that do not record it count as none.

    Args:
        rows: The trials that are done.
    """
    shared = [is_shared(row) for row in rows]
    count = sum(shared)
    if not count:
        return ""
    which = "All trials" if count == len(shared) else f"{count} of {len(shared)} trials"
    return f"{which} were timed while something else used their device or its machine's cores"


def describe_timing_obstacle(
    rows: Iterable[TrialRow], cells: Mapping[Levels, Mapping[int, TrialRow]], baseline: Levels
) -> str:
    """Say why the times of different cells do not compare; empty if they do.

    They compare if every trial was timed alone, and the trials of a cell and of the baseline
    alternate: a machine that slows down in the course of a sweep would be taken for a cell's doing.
    Trials that were timed again in one session alternate from round to round.

    Args:
        rows: The trials that are done.
        cells: The trials of every cell by seed.
        baseline: The baseline cell.
    """
    rows = list(rows)
    if shared := describe_shared_timings(rows):
        return shared
    firsts = [row for row in rows if not is_timed_again(row)]
    if any(row.record["provenance"].get("timings") is None for row in firsts):
        return "The record does not say whether the trials were timed alone"
    spans = {levels: _finish_span(by_seed.values()) for levels, by_seed in cells.items()}
    base = spans.get(baseline)
    apart = [c for c, span in spans.items() if span and base and not _overlap(span, base)]
    if apart:
        return (
            f"The trials of {format_count(len(apart), 'cell')} were timed before or after all of"
            " the baseline's, not in between"
        )
    return ""


def _finish_span(rows: Iterable[TrialRow]) -> tuple[str, str] | None:
    """Return when the first and the last trial was timed, as ISO 8601 in UTC; None if none was.

    A trial is timed at its end; those that were timed again, at the end of their session.
    """
    records = [row.record for row in rows if row.is_done]
    ends = [str(one.get("timing", one["provenance"]).get("finished", "")) for one in records]
    return (min(ends), max(ends)) if ends else None


def _overlap(one: tuple[str, str], other: tuple[str, str]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]
