"""The table of designs. A new one is a `Design` and a line here."""

from kvlab.spec.design import Design
from kvlab.spec.designs.fractional import FRACTIONAL
from kvlab.spec.designs.standard import (
    BASELINE,
    CELLS,
    CUMULATIVE,
    FULL,
    LEAVE_ONE_OUT,
    ONE_FACTOR,
    PAIRWISE,
)

DESIGNS: dict[str, Design] = {
    "full": FULL,
    "one_factor": ONE_FACTOR,
    "baseline": BASELINE,
    "leave_one_out": LEAVE_ONE_OUT,
    "cumulative": CUMULATIVE,
    "pairwise": PAIRWISE,
    "cells": CELLS,
    "fractional": FRACTIONAL,
}


def design_pattern() -> str:
    """Return the regular expression of `design`."""
    names = (
        f"{name}:({'|'.join(map(str, design.arguments))})" if design.arguments else name
        for name, design in DESIGNS.items()
    )
    return f"^({'|'.join(names)})$"


def describe_designs() -> str:
    """Return the names of all designs, as an error message lists them."""
    names = []
    for name, design in DESIGNS.items():
        first, *others = design.arguments or ("",)
        names.append(f"{name}:{first} ({', '.join(map(str, others[:2]))}, ...)" if first else name)
    return ", ".join(names)
