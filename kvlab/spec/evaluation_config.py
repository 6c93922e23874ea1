"""`evaluation` of an experiment: which qualities are measured, and on how much."""

from typing import Annotated, Literal

from pydantic import Field

from kvlab.spec import spec_model as spec
from kvlab.spec.own_extensions import extend

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


@extend("evaluation")
class EvaluationConfig(spec.SpecModel):
    """`evaluation`: quality. Every number once one-shot, and once through the cache if served."""

    omitted_defaults = frozenset({"needle", "loss_bytes", "precision"})

    loss_tokens: spec.PositiveInt = 65_536
    """Validation tokens of the final loss. Unit: tokens. Example: 262144"""
    loss_bytes: spec.PositiveInt | None = None
    """Bytes of validation text of the final loss, in whole documents, in place of loss_tokens: the
    same text for every tokenizer and block size.
    Unit: bytes. Default: loss_tokens decides. Example: 200000"""
    hellaswag: Literal["all", "none"] | spec.NonNegativeInt = "none"
    """all, none, or the first N items. Unit: items. Example: 1000"""
    served: bool = True
    """Measure again through the serving cache. Example: false"""
    served_tokens: spec.PositiveInt | None = None
    """Validation tokens scored through the cache, token by token.
    Unit: tokens. Default: loss_tokens. Example: 16384"""
    recall: spec.NonNegativeInt = 0
    """Rows of the associative recall probe; 0 for none. Unit: rows. Example: 256"""
    positions: bool = False
    """Measure the loss by position; over served_tokens if served. Example: true"""
    needle: NeedleConfig | None = None
    """The needle probe. Default: none. Example: {lengths: [64, 128]}"""
    precision: Literal["training", "float32"] = "training"
    """Of the weights that are evaluated and benchmarked on a GPU: that of the training, or float32.
    On CPU they are always float32.
    Example: float32"""

    def _find_problems(self) -> spec.Problems:
        if self.loss_bytes is None:
            return
        if self.loss_tokens != type(self).model_fields["loss_tokens"].default:
            yield "loss_bytes", "and loss_tokens both say how much text is scored; remove one"
        if self.served_tokens is not None:
            text = "counts tokens, and loss_bytes scores the same text one-shot and served"
            yield "served_tokens", f"{text}; remove one"
        if self.positions:
            text = "is measured over as many tokens as the loss, which loss_bytes does not count"
            yield "positions", f"{text}; give loss_tokens in its place, or leave one out"

    @property
    def hellaswag_items(self) -> int | None:
        """The number of items to score: None for all, 0 for none."""
        if isinstance(self.hellaswag, int):
            return self.hellaswag
        return None if self.hellaswag == "all" else 0
