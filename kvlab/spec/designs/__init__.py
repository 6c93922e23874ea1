"""The designs by name. ``fractional`` takes an argument, as in ``fractional:4``."""

from kvlab.spec.design import Design
from kvlab.spec.designs.fractional import FRACTIONAL
from kvlab.spec.designs.standard import CELLS, CUMULATIVE, FULL, LEAVE_ONE_OUT, ONE_FACTOR, PAIRWISE

DESIGNS: dict[str, Design] = {
    "full": FULL,
    "one_factor": ONE_FACTOR,
    "leave_one_out": LEAVE_ONE_OUT,
    "cumulative": CUMULATIVE,
    "pairwise": PAIRWISE,
    "cells": CELLS,
    "fractional": FRACTIONAL,
}
