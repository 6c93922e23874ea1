"""The sections of reports. A new section is a function in a file and a line of a table here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from kvlab.analysis.study import Study
from kvlab.report.document import Section
from kvlab.report.sections.answer import report_answer
from kvlab.report.sections.cells_table import report_cells
from kvlab.report.sections.downstream_tasks import report_hellaswag, report_lm_eval
from kvlab.report.sections.factors import report_factors
from kvlab.report.sections.interactions import report_interactions
from kvlab.report.sections.interval_widths import report_interval_widths
from kvlab.report.sections.kv_memory import report_memory
from kvlab.report.sections.looks import report_looks
from kvlab.report.sections.loss_curves import report_loss_curves
from kvlab.report.sections.main_effects import report_effects
from kvlab.report.sections.matched_sizes import report_matched_sizes
from kvlab.report.sections.pareto_fronts import report_equal_memory, report_pareto
from kvlab.report.sections.probes import report_probes
from kvlab.report.sections.provenance import report_divergence, report_failures, report_provenance
from kvlab.report.sections.quantized_training import report_quantized_training
from kvlab.report.sections.reuse import report_reuse
from kvlab.report.sections.roofline_table import report_roofline
from kvlab.report.sections.search_answer import (
    report_best_trials,
    report_next_sweep,
    report_search_answer,
)
from kvlab.report.sections.search_figures import (
    report_importances,
    report_search_front,
    report_search_history,
)
from kvlab.report.sections.search_trials import (
    report_all_trials,
    report_search_setup,
    report_unmeasured,
)
from kvlab.report.sections.serving_gap import report_serving_gap
from kvlab.report.sections.serving_speed import report_benchmark_curves, report_speed
from kvlab.report.sections.size_trends import report_size_trends
from kvlab.report.sections.starting_weights import report_starting_weights
from kvlab.report.sections.tuned_settings import report_tuned_settings


@dataclass(frozen=True)
class SectionEntry:
    """A member of the table of sections.

    Attributes:
        make: Returns the section's content; None if the study has nothing for it.
        compares_quality: Whether the section compares what models have learned. Such sections are
            left out by default if no weights are trained.
    """

    make: Callable[[Study], Section | None]
    compares_quality: bool = False


SECTIONS: dict[str, SectionEntry] = {
    "answer": SectionEntry(report_answer),
    "pareto": SectionEntry(report_pareto, compares_quality=True),
    "divergence": SectionEntry(report_divergence, compares_quality=True),
    "effects": SectionEntry(report_effects, compares_quality=True),
    "looks": SectionEntry(report_looks, compares_quality=True),
    "interactions": SectionEntry(report_interactions, compares_quality=True),
    "size-trends": SectionEntry(report_size_trends, compares_quality=True),
    "matched": SectionEntry(report_matched_sizes, compares_quality=True),
    "serving-gap": SectionEntry(report_serving_gap, compares_quality=True),
    "reuse": SectionEntry(report_reuse),
    "quantized-training": SectionEntry(report_quantized_training, compares_quality=True),
    "hellaswag": SectionEntry(report_hellaswag, compares_quality=True),
    "lm-eval": SectionEntry(report_lm_eval, compares_quality=True),
    "probes": SectionEntry(report_probes, compares_quality=True),
    "curves": SectionEntry(report_loss_curves, compares_quality=True),
    "cells": SectionEntry(report_cells, compares_quality=True),
    "equal-memory": SectionEntry(report_equal_memory, compares_quality=True),
    "interval-widths": SectionEntry(report_interval_widths, compares_quality=True),
    "memory": SectionEntry(report_memory),
    "speed": SectionEntry(report_speed),
    "benchmark-curves": SectionEntry(report_benchmark_curves),
    "roofline": SectionEntry(report_roofline),
    "design": SectionEntry(report_factors),
    "tuned": SectionEntry(report_tuned_settings, compares_quality=True),
    "starts": SectionEntry(report_starting_weights),
    "failures": SectionEntry(report_failures),
    "provenance": SectionEntry(report_provenance),
}
"""The sections of a design's report by name, in order; those of the appendix come last."""

SEARCH_SECTIONS: dict[str, SectionEntry] = {
    "answer": SectionEntry(report_search_answer),
    "best": SectionEntry(report_best_trials),
    "next": SectionEntry(report_next_sweep),
    "front": SectionEntry(report_search_front),
    "history": SectionEntry(report_search_history),
    "importances": SectionEntry(report_importances),
    "space": SectionEntry(report_search_setup),
    "unmeasured": SectionEntry(report_unmeasured),
    "trials": SectionEntry(report_all_trials),
    "starts": SectionEntry(report_starting_weights),
    "provenance": SectionEntry(report_provenance),
}
"""The sections of a search's report by name, in the same order. A search has no factors to tell
apart, so what compares levels is not among them."""


def choose_sections(is_search: bool) -> dict[str, SectionEntry]:
    """Return the table of sections for a search or for a design."""
    return SEARCH_SECTIONS if is_search else SECTIONS


def explain_unknown_section(name: str, table: Mapping[str, SectionEntry] = SECTIONS) -> str:
    """Return what is wrong with a name that is not in a table, and a hint."""
    matches = get_close_matches(name, table, 1)
    hint = f"did you mean {matches[0]}?" if matches else f"use {', '.join(table)}"
    if name in SECTIONS or name in SEARCH_SECTIONS:
        kind = "a search" if table is SEARCH_SECTIONS else "a design"
        return f"is not a section of {kind}'s report; use {', '.join(table)}"
    return f"is not a section of reports; {hint}"
