"""The answer where no weights are trained: what layouts store and how fast they decode."""

from kvlab.report.numbers import bytes_text, counted, shown, times
from kvlab.report.section import Paragraph, Span, Strong, paragraph
from kvlab.report.study import Study


def untrained_answer(study: Study) -> list[Paragraph]:
    """Bytes, times, and what not to conclude."""
    about = paragraph(
        "The weights are as drawn, so losses say nothing and are left out: this is a study of"
        " memory and speed, which do not depend on the weights' values."
    )
    return [part for part in (_bytes(study), _times(study), about) if part]


def _bytes(study: Study) -> Paragraph | None:
    base = study.kv_bytes(study.baseline)
    if base is None:
        return None
    stored = {levels: study.kv_bytes(levels) for levels in study.cells}
    smaller = [
        (Strong(study.label(levels)), f" {times(base / count)}")
        for levels, count in sorted(stored.items(), key=lambda item: -(item[1] or 0))
        if count is not None and count < base
    ]
    spans: list[Span] = [f"The baseline's cache holds {bytes_text(base)} for one sequence at"]
    if not smaller:
        return paragraph(*spans, " block size; no other cell's is smaller.")
    spans.append(" block size; smaller are ")
    for number, part in enumerate(smaller):
        last = number and number == len(smaller) - 1
        spans += [" and " if last else ", " if number else "", *part]
    return paragraph(*spans, ".")


def _times(study: Study) -> Paragraph | None:
    metric = "tpot_ms_p50"
    found = study.means(metric)
    base = found.get(study.baseline)
    if base is None:
        return None
    spans: list[Span] = [
        f"A token takes the baseline {shown(metric, base)} ms (median, batch 1,"
        f" {counted(len(study.seeds), 'run')} a cell)"
    ]
    fastest = min(found, key=lambda levels: (found[levels], study.place(levels)))
    if fastest != study.baseline:
        spans += ["; least it takes ", Strong(study.label(fastest))]
        spans.append(f", {shown(metric, found[fastest])} ms")
    return paragraph(*spans, ".")
