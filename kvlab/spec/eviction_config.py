"""`serving.evict`: a cache that keeps a fixed number of tokens and drops the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from kvlab.spec.spec_model import (
    FieldMessage,
    NonNegativeInt,
    PositiveInt,
    SpecModel,
    raise_problems,
)

DEFAULT_SINKS = 4
"""First tokens that `recency` keeps, as StreamingLLM does (arXiv 2309.17453)."""

SCORE_BYTES = 8
"""Of a kept token and head under `heavy_hitters`: its score as a float32, and its position."""


@dataclass(frozen=True)
class EvictionRule:
    """Which tokens a slot keeps, resolved.

    Attributes:
        keep: tokens that are kept, the newest included.
        sinks: the first tokens of a text, which are never dropped.
        recent: the newest tokens, which are never dropped.
        is_scored: whether the others are ranked by the attention that they received. Otherwise
            ``sinks + recent = keep``, and nothing else is kept.
    """

    keep: int
    sinks: int
    recent: int
    is_scored: bool

    @property
    def score_bytes(self) -> int:
        """Bytes that a kept token needs for each head beside its K and V."""
        return SCORE_BYTES if self.is_scored else 0


class EvictConfig(SpecModel):
    """`serving.evict`: global layers keep some tokens of the context and drop the others.

    ``recency`` keeps the first ``sinks`` tokens and the newest (StreamingLLM, arXiv 2309.17453).
    ``heavy_hitters`` keeps the newest ``recent`` tokens, and of the others those that received the
    most attention, for each K/V head by itself (H2O, arXiv 2306.14048). Keys keep the rotation of
    their own position. The budget is ``keep`` tokens or ``bytes`` of one sequence.
    """

    keep: PositiveInt | None = Field(
        default=None,
        description="Tokens that each global layer keeps, the newest included.",
        examples=[64],
        json_schema_extra={"unit": "tokens"},
    )
    bytes: PositiveInt | None = Field(
        default=None,
        description="In place of keep: the most bytes that the cache of one sequence of"
        " block_size tokens may take, over all layers.",
        examples=[8388608],
        json_schema_extra={"unit": "bytes"},
    )
    by: Literal["recency", "heavy_hitters"] = Field(
        default="recency",
        description="Which tokens are kept: the newest, or those that received most attention.",
        examples=["heavy_hitters"],
        json_schema_extra={"given": {"keep": 64}},
    )
    sinks: NonNegativeInt | None = Field(
        default=None,
        description="First tokens of a text that are always kept.",
        examples=[8],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "4 by recency, 0 by heavy_hitters",
            "given": {"keep": 64},
        },
    )
    recent: PositiveInt | None = Field(
        default=None,
        description="Newest tokens that heavy_hitters always keeps.",
        examples=[16],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "half of the tokens kept",
            "given": {"keep": 64, "by": "heavy_hitters"},
        },
    )

    @model_validator(mode="after")
    def _check(self) -> "EvictConfig":
        raise_problems(self._find_problems())
        return self

    def _find_problems(self) -> Iterator[FieldMessage]:
        if (self.keep is None) == (self.bytes is None):
            text = "is missing" if self.keep is None else "and bytes are two budgets"
            yield "keep", f"{text}; give keep or bytes"
        if self.recent is not None and self.by == "recency":
            yield (
                "recent",
                "is read only by: heavy_hitters; by recency all but sinks are the newest",
            )
        if self.keep is not None:
            yield from self.find_budget_problems(self.keep)

    def find_budget_problems(self, keep: int) -> Iterator[FieldMessage]:
        """Yield why ``keep`` tokens are too few."""
        rule = self.resolve(keep)
        least = rule.sinks + (1 if self.by == "recency" else rule.recent + 1)
        if keep < least:
            recent = "" if self.by == "recency" else f" and recent = {rule.recent}"
            text = f"has no place beside sinks = {rule.sinks}{recent}"
            if self.keep is None:
                text = f"is enough to keep {keep}, which {text}"
            yield "bytes" if self.keep is None else "keep", f"{text}; use more, or lower them"

    def resolve(self, keep: int) -> EvictionRule:
        """Return the rule at a budget of ``keep`` tokens."""
        is_scored = self.by == "heavy_hitters"
        default = 0 if is_scored else DEFAULT_SINKS
        sinks = default if self.sinks is None else self.sinks
        recent = (self.recent or max(1, keep // 2)) if is_scored else keep - sinks
        return EvictionRule(keep, sinks, recent, is_scored)
