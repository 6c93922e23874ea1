"""`serving.evict`: which tokens global layers keep. No torch."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field

from kvlab.extensions.eviction.policies import EvictionPolicy
from kvlab.spec.members import name_or_member
from kvlab.spec.spec_model import NonNegativeInt, PositiveInt, Problems, SpecModel

if TYPE_CHECKING:
    from kvlab.spec.model_config import ModelConfig
    from kvlab.spec.serving_config import ServingConfig

DEFAULT_SINKS = 4
"""First tokens that `recency` keeps, as StreamingLLM does (arXiv 2309.17453)."""

DEFAULT_OBSERVERS, DEFAULT_POOL = 32, 7
"""Of `snapkv`: its window and its pooling in the experiments of arXiv 2404.14469."""

SCORE_BYTES = 8
"""Of a kept token and head under a policy: its score as a float32, and its position."""

PROMPT_SCORE_BYTES = 4
"""Of a token of the prompt and head that its last tokens rank: its score, a float32."""


@dataclass(frozen=True)
class EvictionRule:
    """Which tokens a slot keeps, resolved.

    Attributes:
        keep: tokens that are kept, the newest included; with ``prompt`` of the prompt alone.
        sinks: the first tokens of a text, which are never dropped.
        recent: the newest tokens, which are never dropped; with ``prompt`` its last ones, whose
            queries rank the others.
        is_scored: whether the others are ranked. Otherwise ``sinks + recent = keep``, and nothing
            else is kept.
        prompt: tokens of a text that are reduced to ``keep`` once all of them are stored. Later
            ones are kept. None: a token is dropped whenever a newer one needs its place.
        pool: with ``prompt``, neighbours of which the largest score counts; else None.
        policy: by which the others are ranked; None for what received most attention.
        top_share: tokens that the last of several slots keeps beside those that always stay, as a
            part of their mean; the number changes linearly with depth. None for slots alike.
    """

    keep: int
    sinks: int
    recent: int
    is_scored: bool
    prompt: int | None = None
    pool: int | None = None
    policy: EvictionPolicy | None = None
    top_share: float | None = None

    def of_place(self, place: int, places: int) -> "EvictionRule":
        """Return the rule of one of several slots, by its place in depth. They keep as many tokens
        in all as if they were alike (PyramidKV, arXiv 2406.02069)."""
        if self.top_share is None or places == 1:
            return self
        top, always = Fraction(str(self.top_share)), self.count_always_kept()

        def count_below(slot: int) -> int:
            shares = slot * (2 - top) - (1 - top) * slot * (slot - 1) / (places - 1)
            return round((self.keep - always) * shares)

        keep = always + count_below(place + 1) - count_below(place)
        return replace(self, keep=keep, recent=self.recent if self.is_scored else keep - self.sinks)

    def count_always_kept(self) -> int:
        """Return how many tokens stay whatever they are."""
        return self.sinks + (self.recent if self.is_scored else 0)

    @property
    def slot_score_bytes(self) -> int:
        """Bytes that a slot that drops tokens has for each K/V head beside its K and V."""
        if self.prompt is not None:
            return PROMPT_SCORE_BYTES * (self.prompt - self.recent)
        return self.keep * SCORE_BYTES if self.is_scored else 0

    def identity(self) -> dict[str, int | float | bool | str]:
        """Return the fields that say what is computed, as plain data."""
        own = vars(self) | {"policy": self.policy and self.policy.describe()}
        return {key: value for key, value in own.items() if value is not None}


if TYPE_CHECKING:
    _By = str | EvictionPolicy
else:
    _By = name_or_member(EvictionPolicy, lambda: EvictionPolicy.own_names)


class EvictConfig(SpecModel):
    """`serving.evict`: global layers keep some tokens of the context and drop the others.

    ``recency`` keeps the first ``sinks`` tokens and the newest (StreamingLLM, arXiv 2309.17453).
    ``heavy_hitters`` keeps the newest ``recent`` tokens, and of the others those that received the
    most attention, for each K/V head by itself (H2O, arXiv 2306.14048). ``snapkv`` reduces the
    first ``prompt`` tokens to ``keep`` at their end, by the attention of the last ``recent`` of
    them, and drops none of the later ones (SnapKV, arXiv 2404.14469). So does a policy of a user's
    file that is given a ``prompt``, by its scores. Keys keep the rotation of their own position.
    The budget is ``keep`` tokens or ``bytes`` of one sequence.
    """

    keep: PositiveInt | None = None
    """Tokens that each global layer keeps, the newest included; with prompt those of the prompt.
    Unit: tokens. Example: 64"""
    bytes: PositiveInt | None = None
    """In place of keep: the most bytes that the cache of one sequence of block_size tokens may
    take, over all layers. Where kv_dtype is model they are those of float32, also if a GPU trains
    in fewer bits.
    Unit: bytes. Example: 8388608"""
    by: _By = "recency"
    """Which tokens are kept: the newest, those that received most attention, or those of the prompt
    to which its last tokens attend most; or a policy of a user's file.
    Example: heavy_hitters, keep: 64"""
    sinks: NonNegativeInt | None = None
    """First tokens of a text that are always kept.
    Unit: tokens. Default: 4 by recency, else 0. Example: 8, keep: 64"""
    recent: PositiveInt | None = None
    """Newest tokens that heavy_hitters and policies always keep; with prompt its last tokens, which
    are kept and whose queries rank the others.
    Unit: tokens. Default: half of the tokens kept; 32 with prompt. Example: 16, keep: 64, by:
    heavy_hitters"""
    prompt: PositiveInt | None = None
    """First tokens of a text that snapkv, or a policy, reduces to keep once it has all of them.
    Unit: tokens. Example: 256, keep: 64, by: snapkv"""
    pool: PositiveInt | None = None
    """Neighbouring tokens of the prompt of which the largest score counts, so that what stands
    beside a token that is attended to is kept too; an odd number.
    Unit: tokens. Default: 7 by snapkv; with a policy 1. Example: 5, keep: 64, by: snapkv, prompt:
    256"""
    top_share: Annotated[float, Field(gt=0.0, lt=2.0)] | None = None
    """How many tokens the last global layer keeps beside sinks and recent, as a part of the mean
    over global layers, which is keep. The first has 2 - top_share of the mean, and the number
    changes linearly between them (PyramidKV, arXiv 2406.02069). Above 1, deeper layers keep more.
    Unit: none. Default: all keep as many. Example: 0.25, keep: 64"""

    def _find_problems(self) -> Problems:
        if (self.keep is None) == (self.bytes is None):
            text = "is missing" if self.keep is None else "and bytes are two budgets"
            yield "keep", f"{text}; give keep or bytes"
        if self.recent is not None and self.by == "recency":
            text = "is read only by what ranks tokens, such as heavy_hitters"
            yield "recent", f"{text}; by recency all but sinks are the newest"
        if self.prompt is not None and self.by in ("recency", "heavy_hitters"):
            hint = "use by: snapkv" if self.by == "heavy_hitters" else "leave it out"
            yield "prompt", f"is read only by snapkv and policies of a file; {hint}"
            return
        if self.pool is not None and self.prompt is None:
            yield "pool", "is read only with a prompt; leave it out, or set prompt"
        elif self.pool is not None and self.pool % 2 == 0:
            text = "is even, so it has no token in its middle"
            yield "pool", f"{text}; use {self.pool - 1} or {self.pool + 1}"
        if self.prompt is None and self.by == "snapkv":
            yield "prompt", "is missing; by snapkv it is the tokens that are reduced to keep"
            return
        recent = self.recent or DEFAULT_OBSERVERS
        if self.prompt is not None and self.prompt <= recent:
            text = f"has no token before its last {recent}, which rank the others"
            yield "prompt", f"{text}; use more, or set recent"
        if self.keep is not None:
            yield from self.find_budget_problems(self.keep)

    def find_budget_problems(self, keep: int) -> Problems:
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
        is_scored = self.by != "recency"
        top_share = None if self.top_share == 1.0 else self.top_share  # both say the same
        policy = self.by if isinstance(self.by, EvictionPolicy) else None
        if self.prompt is not None:
            recent = self.recent or DEFAULT_OBSERVERS
            pool = self.pool or (DEFAULT_POOL if self.by == "snapkv" else 1)
            sinks = self.sinks or 0
            of_prompt = self.prompt, pool, policy, top_share
            return EvictionRule(keep, sinks, recent, True, *of_prompt)
        default = 0 if is_scored else DEFAULT_SINKS
        sinks = default if self.sinks is None else self.sinks
        recent = (self.recent or max(1, keep // 2)) if is_scored else keep - sinks
        return EvictionRule(keep, sinks, recent, is_scored, policy=policy, top_share=top_share)


class EvictFields(SpecModel):
    """What `serving` gets."""

    omitted_defaults = frozenset({"evict"})

    evict: EvictConfig | None = None
    """Keep a fixed number of tokens in global layers, and drop the others. Example: {keep: 64}"""

    def _find_problems(self) -> Problems:
        yield from super()._find_problems()
        by = "recency" if self.evict is None else self.evict.by
        if cast("ServingConfig", self).compile and by != "recency":
            text = f"needs steps of fixed shapes, which evict by {by} does not have"
            yield "compile", f"{text}; leave one of the two out"

    def identity_of(self, model: "ModelConfig") -> dict[str, Any]:
        facts = super().identity_of(model)
        facts.pop("evict", None)  # slots have the rule
        return facts


CHECKED = {"keep": 9, "sinks": 2}
"""What a member is tried with beside the core's servings."""
