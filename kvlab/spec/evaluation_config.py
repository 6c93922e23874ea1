"""`evaluation` of an experiment: which qualities are measured, and on how much."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvlab.own_extensions import extend
from kvlab.spec import spec_model as spec

HELLASWAG_ITEMS = 10_042
"""Items of HellaSwag's validation set."""


@extend("evaluation")
class EvaluationConfig(spec.SpecModel):
    """`evaluation`: quality. Every number once one-shot, and once through the cache if served."""

    omitted_defaults = frozenset({"loss_bytes", "precision", "text_parts"})

    loss_tokens: spec.PositiveInt = 65_536
    """Validation tokens of the final loss. Unit: tokens. Example: 262144"""
    loss_bytes: spec.PositiveInt | None = None
    """Bytes of validation text of the final loss, in whole documents, in place of loss_tokens: the
    same text for every tokenizer and block size.
    Unit: bytes. Default: loss_tokens decides. Example: 200000"""
    hellaswag: (
        Literal["all", "none"] | Annotated[spec.NonNegativeInt, Field(le=HELLASWAG_ITEMS)]
    ) = "none"
    """all, none, or the first N items. Unit: items. Example: 1000"""
    text_parts: Annotated[int, Field(ge=2)] | None = None
    """Divide the documents of the held-out text, and the items of HellaSwag, into so many parts.
    Seed 0 scores the first, seed 1 the second, and so on. For models that are not trained: nothing
    else differs between their seeds, whose intervals are then over texts.
    Unit: parts. Default: all seeds score the same text. Example: 8"""
    served: bool = True
    """Measure again through the serving cache. Example: false"""
    served_tokens: spec.PositiveInt | None = None
    """Validation tokens scored through the cache, token by token.
    Unit: tokens. Default: loss_tokens. Example: 16384"""
    positions: bool = False
    """Measure the loss by position; over served_tokens if served. Example: true"""
    precision: Literal["training", "float32"] = "training"
    """Of the weights that are evaluated and benchmarked on a GPU: that of the training, or float32.
    On CPU they are always float32.
    Example: float32"""

    def identity(self) -> dict[str, Any]:
        # the first fingerprints have this key, which an extension may not have added
        return {"recall": 0} | super().identity()

    def _find_problems(self) -> spec.Problems:
        items = self.hellaswag_items
        if self.text_parts is not None and items and items < self.text_parts:
            text = f"has fewer items than the {self.text_parts} parts of text_parts"
            yield "hellaswag", f"{text}; use {self.text_parts} or more"
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
