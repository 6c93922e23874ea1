"""The sections of reports. A new section is a function in a file and a line of a table here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvlab import own_extensions as own
from kvlab.analysis.study import Study
from kvlab.errors import UsageError
from kvlab.humanize import suggest_name
from kvlab.report.document import Section
from kvlab.report.sections import (
    answer,
    cells,
    design,
    effects,
    fronts,
    record,
    serving,
    speed,
    tasks,
)


@dataclass(frozen=True)
class SectionEntry:
    """A member of the table of sections.

    Attributes:
        make: Returns the section's content; None if the study has nothing for it.
        compares_quality: Whether the section compares what models have learned. Such sections are
            left out by default if no weights are trained.
    """

    make: Callable[[Study], Section | None]
    compares_quality: bool = True


SECTIONS: dict[str, SectionEntry] = {
    "answer": SectionEntry(answer.report_answer, False),
    "pareto": SectionEntry(fronts.report_pareto),
    "divergence": SectionEntry(record.report_divergence),
    "effects": SectionEntry(effects.report_effects),
    "interactions": SectionEntry(effects.report_interactions),
    "matched": SectionEntry(design.report_matched_sizes),
    "serving-gap": SectionEntry(serving.report_serving_gap),
    "hellaswag": SectionEntry(tasks.report_hellaswag),
    "probes": SectionEntry(tasks.report_probes),
    "extensions": SectionEntry(tasks.report_own_metrics),
    "curves": SectionEntry(cells.report_loss_curves),
    "cells": SectionEntry(cells.report_cells),
    "equal-memory": SectionEntry(fronts.report_equal_memory),
    "memory": SectionEntry(speed.report_memory, False),
    "speed": SectionEntry(speed.report_speed, False),
    "benchmark-curves": SectionEntry(speed.report_benchmark_curves, False),
    "roofline": SectionEntry(speed.report_roofline, False),
    "design": SectionEntry(design.report_factors, False),
    "starts": SectionEntry(record.report_starting_weights, False),
    "failures": SectionEntry(record.report_failures, False),
    "provenance": SectionEntry(record.report_provenance, False),
}
"""The sections of a design's report by name, in order; those of the appendix come last."""


for one in (part for parts in own.load_parts().values() for part in parts.sections):
    entry = SectionEntry(own.import_late(one.make), one.compares_quality)
    SECTIONS = own.insert_after(SECTIONS, one.after, {one.name: entry})


def _of_search(make: Callable[..., Section | None]) -> SectionEntry:
    return SectionEntry(lambda study: make(study, study.search), False)


SEARCH_SECTIONS: dict[str, SectionEntry] = {
    **{
        k: _of_search(own.import_late(make))
        for k, make in own.name_members("search_sections").items()
    },
    "starts": SECTIONS["starts"],
    "provenance": SECTIONS["provenance"],
}
"""The sections of a search's report by name, in the same order. A search has no factors to tell
apart, so what compares levels is not among them."""


def choose_sections(is_search: bool) -> dict[str, SectionEntry]:
    """Return the table of sections for a search or for a design.

    Raises:
        UsageError: The extension of searches is not there.
    """
    if is_search and (missing := own.explain_missing("search")):
        raise UsageError(f"search {missing}")
    return SEARCH_SECTIONS if is_search else SECTIONS


def explain_unknown_section(name: str, table: Mapping[str, SectionEntry] = SECTIONS) -> str:
    """Return what is wrong with a name that is not in a table, and a hint."""
    if name in SECTIONS or name in SEARCH_SECTIONS:
        kind = "a search" if table is SEARCH_SECTIONS else "a design"
        return f"is not a section of {kind}'s report; use {', '.join(table)}"
    return f"is not a section of reports; {suggest_name(name, table)}"


def make_answer(study: Study) -> Section:
    section = choose_sections(study.search is not None)["answer"].make(study)
    assert section is not None, "every report has an answer"
    return section
