"""The designs by name. ``fractional`` takes an argument, as in ``fractional:4``."""

from kvlab.spec.design import Design
from kvlab.spec.designs.cells import CELLS
from kvlab.spec.designs.cumulative import CUMULATIVE
from kvlab.spec.designs.fractional import FRACTIONAL
from kvlab.spec.designs.full import FULL
from kvlab.spec.designs.leave_one_out import LEAVE_ONE_OUT
from kvlab.spec.designs.one_factor import ONE_FACTOR
from kvlab.spec.designs.pairwise import PAIRWISE

DESIGNS: dict[str, Design] = {
    "full": FULL,
    "one_factor": ONE_FACTOR,
    "leave_one_out": LEAVE_ONE_OUT,
    "cumulative": CUMULATIVE,
    "pairwise": PAIRWISE,
    "cells": CELLS,
    "fractional": FRACTIONAL,
}
