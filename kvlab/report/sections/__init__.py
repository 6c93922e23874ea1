"""The sections of a report, in order: name -> function. A new one is a file and a line here."""

from collections.abc import Callable
from difflib import get_close_matches

from kvlab.report.document import Section
from kvlab.report.sections.answer import report_answer
from kvlab.report.sections.cells_table import report_cells
from kvlab.report.sections.equal_memory import report_equal_memory
from kvlab.report.sections.factors import report_factors
from kvlab.report.sections.failed_trials import report_failures
from kvlab.report.sections.hellaswag_accuracy import report_hellaswag
from kvlab.report.sections.interactions import report_interactions
from kvlab.report.sections.kv_memory import report_memory
from kvlab.report.sections.loss_curves import report_loss_curves
from kvlab.report.sections.main_effects import report_effects
from kvlab.report.sections.pareto_fronts import report_pareto
from kvlab.report.sections.probes import report_probes
from kvlab.report.sections.projection import report_projection
from kvlab.report.sections.provenance_table import report_provenance
from kvlab.report.sections.roofline_table import report_roofline
from kvlab.report.sections.serving_gap import report_serving_gap
from kvlab.report.sections.serving_speed import report_benchmark_curves, report_speed
from kvlab.report.sections.starting_weights import report_starting_weights
from kvlab.report.study import Study

SectionFunction = Callable[[Study], Section | None]
"""Returns the section's content; None if the study has nothing for it."""

SECTIONS: dict[str, SectionFunction] = {
    "answer": report_answer,
    "design": report_factors,
    "cells": report_cells,
    "effects": report_effects,
    "interactions": report_interactions,
    "pareto": report_pareto,
    "equal-memory": report_equal_memory,
    "serving-gap": report_serving_gap,
    "hellaswag": report_hellaswag,
    "probes": report_probes,
    "curves": report_loss_curves,
    "memory": report_memory,
    "speed": report_speed,
    "benchmark-curves": report_benchmark_curves,
    "roofline": report_roofline,
    "projection": report_projection,
    "starts": report_starting_weights,
    "failures": report_failures,
    "provenance": report_provenance,
}


QUALITY_SECTIONS = frozenset(
    (
        *("cells", "effects", "interactions", "pareto", "equal-memory"),
        *("serving-gap", "hellaswag", "probes", "curves"),
    )
)
"""Those that compare what models have learned."""


def explain_unknown_section(name: str) -> str:
    """What to say of a name that the table does not have: the rule and the way out."""
    near = get_close_matches(name, SECTIONS, 1)
    way = f"did you mean {near[0]}?" if near else f"use {', '.join(SECTIONS)}"
    return f"is not a section of reports; {way}"
