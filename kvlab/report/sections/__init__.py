"""The sections of a report, in order: name -> function. A new one is a file and a line here."""

from difflib import get_close_matches

from kvlab.report.section import MakeSection
from kvlab.report.sections.answer import answer
from kvlab.report.sections.benchmark_curves import benchmark_curves
from kvlab.report.sections.cells import cells
from kvlab.report.sections.curves import curves
from kvlab.report.sections.design import design
from kvlab.report.sections.effects import effects
from kvlab.report.sections.equal_memory import equal_memory
from kvlab.report.sections.failures import failures
from kvlab.report.sections.hellaswag import hellaswag
from kvlab.report.sections.interactions import interactions
from kvlab.report.sections.memory import memory
from kvlab.report.sections.pareto import pareto
from kvlab.report.sections.probes import probes
from kvlab.report.sections.projection import projection
from kvlab.report.sections.provenance import provenance
from kvlab.report.sections.roofline import roofline
from kvlab.report.sections.serving_gap import serving_gap
from kvlab.report.sections.speed import speed
from kvlab.report.sections.starts import starts

SECTIONS: dict[str, MakeSection] = {
    "answer": answer,
    "design": design,
    "cells": cells,
    "effects": effects,
    "interactions": interactions,
    "pareto": pareto,
    "equal-memory": equal_memory,
    "serving-gap": serving_gap,
    "hellaswag": hellaswag,
    "probes": probes,
    "curves": curves,
    "memory": memory,
    "speed": speed,
    "benchmark-curves": benchmark_curves,
    "roofline": roofline,
    "projection": projection,
    "starts": starts,
    "failures": failures,
    "provenance": provenance,
}


QUALITY = frozenset(
    (
        *("cells", "effects", "interactions", "pareto", "equal-memory"),
        *("serving-gap", "hellaswag", "probes", "curves"),
    )
)
"""Those that compare what models have learned."""


def unknown_section(name: str) -> str:
    """What to say of a name that the table does not have: the rule and the way out."""
    near = get_close_matches(name, SECTIONS, 1)
    way = f"did you mean {near[0]}?" if near else f"use {', '.join(SECTIONS)}"
    return f"is not a section of reports; {way}"
