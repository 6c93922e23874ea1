"""`evaluation.recall` and `evaluation.needle` of an experiment."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvlab.spec import spec_model as spec

if TYPE_CHECKING:
    from kvlab.spec.experiment import Experiment

NEEDLE_KEY_TOKENS = 4
NEEDLE_ANSWER_TOKENS = 4

SHORTEST_NEEDLE_ROW = 4 * (NEEDLE_KEY_TOKENS + NEEDLE_ANSWER_TOKENS)
"""Tokens of the shortest row of the needle probe: half of it is text."""

Depth = Annotated[float, Field(ge=0.0, le=1.0)]


class NeedleConfig(spec.SpecModel):
    """`evaluation.needle`: find a key's answer in real text, by length and depth."""

    lengths: Annotated[spec.TupleOf[spec.PositiveInt], Field(min_length=1)]
    """Tokens of a row, in increasing order. Unit: tokens. Example: [64, 128, 256]"""
    depths: Annotated[spec.TupleOf[Depth], Field(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Shares of the text before the needle, in increasing order.
    Unit: share. Example: [0, 0.5, 1]"""
    rows: Annotated[spec.PositiveInt, Field(ge=2)] = 32
    """Rows of each length and depth; errors are over them. Unit: rows. Example: 64"""

    def _find_problems(self) -> spec.Problems:
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if list(values) != sorted(set(values)):
                increasing = ", ".join(f"{value:g}" for value in sorted(set(values)))
                yield name, f"does not increase; use [{increasing}]"
        if self.lengths[0] < SHORTEST_NEEDLE_ROW:
            text = "has a length that leaves too little text around the needle and its question"
            yield "lengths", f"{text}; use {SHORTEST_NEEDLE_ROW} or more"


class ProbeFields(spec.SpecModel):
    """What `evaluation` gets."""

    omitted_defaults = frozenset({"needle"})

    recall: spec.NonNegativeInt = 0
    """Rows of the associative recall probe; 0 for none. Unit: rows. Example: 256"""
    needle: NeedleConfig | None = None
    """The needle probe. Default: none. Example: {lengths: [64, 128]}"""


def find_problems(experiment: "Experiment") -> spec.Problems:
    """Yield why a model cannot read the rows of a probe."""
    model, probes = experiment.model, ProbeFields.of(experiment.evaluation)
    needle = probes.needle
    if probes.recall and model.block_size < 4:
        text = f"needs rows of 4 tokens, and block_size = {model.block_size}"
        yield "evaluation.recall", f"{text}; use 4 or more, or recall: 0"
    has_end = model.position_scheme.has_embedding
    if needle is not None and needle.lengths[-1] > model.block_size and has_end:
        text = f"exceeds block_size = {model.block_size}, where learned positions end"
        yield "evaluation.needle.lengths", f"{text}; use {model.block_size} or less"


def list_text_requests(experiment: "Experiment") -> Iterator[tuple[str, object, int, int]]:
    """Yield the held-out text that a row of the needle probe needs."""
    needle = ProbeFields.of(experiment.evaluation).needle
    if needle is not None:
        longest = needle.lengths[-1]
        yield "evaluation.needle.lengths", list(needle.lengths), longest, longest


def derive_needle_loss_change(measurements: Mapping[str, float]) -> float | None:
    """Return what serving adds to the loss of the needle's answer."""
    if not {"needle_loss", "needle_loss_served"} <= measurements.keys():
        return None
    return measurements["needle_loss_served"] - measurements["needle_loss"]
