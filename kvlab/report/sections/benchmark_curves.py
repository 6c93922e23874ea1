"""Latency against prompt and context, throughput against batch."""

from kvlab.report.benchmark_lines import benchmark_lines
from kvlab.report.benchmark_plots import MOST, curves
from kvlab.report.numbers import counted
from kvlab.report.section import Content, Figure, Section, paragraph
from kvlab.report.study import Study


def benchmark_curves(study: Study) -> Section | None:
    """Shown if trials measured at several contexts or batch sizes."""
    lines, keys = benchmark_lines(study, MOST)
    drawn = list(curves(lines, keys))
    if not drawn:
        return None
    spoiled = len({line["variant"] for line in lines if line["noisy"]})
    noisy = (
        f" In {counted(spoiled, 'cell')} of {len(keys)} something else used the machine, or the"
        " times did not settle: see the lines of the trials' results."
        if spoiled
        else ""
    )
    contents: list[Content] = [
        paragraph(
            "The baseline and the cells that differ from it in one factor; means over seeds."
            f"{noisy}",
        )
    ]
    contents += [Figure(each.name, each.caption, each.alt, each.plot) for each in drawn]
    return Section("Latency and throughput curves", tuple(contents))
