"""`benchmark.conversations`: a load of conversations whose turns reuse the K/V of earlier ones."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlab.spec.measure_options import MeasureEntry, MeasureOptions, TextNeed
from kvlab.spec.spec_model import NonNegativeInt, PositiveInt, Problems, SpecModel, TupleOf

MAX_DRAWN = 10**9
"""No draw is above it: tokens, turns or seconds."""

MAX_REUSE_TURNS = 16
"""Turns whose hit rate is a metric of its own; the lines of a result have all."""

Amount = Annotated[float, Field(ge=0, le=MAX_DRAWN)]


class Draw(SpecModel):
    """A number that is drawn anew for every turn or conversation. A plain number is `constant`.

    Draws below ``min`` or above ``max`` are set to them; ``mean`` is that of the distribution
    before. Tokens and turns are rounded, and at least 1.
    """

    distribution: Literal["constant", "uniform", "geometric", "exponential", "lognormal"]
    """What it is drawn from. Example: geometric, sigma: null"""
    mean: Amount | None = None
    """Of constant, geometric (1, 2, ...), exponential and lognormal.
    Unit: of the key. Default: none. Example: 12"""
    sigma: Annotated[float, Field(gt=0, le=10)] | None = None
    """Of lognormal: the standard deviation of the logarithm.
    Unit: none. Default: none. Example: 0.5, distribution: lognormal, mean: 24, max: 96"""
    min: Amount | None = None
    """The least; uniform draws start here.
    Unit: of the key. Default: 1 of tokens and turns, else 0. Example: 4, distribution: uniform,
    mean: null, sigma: null, max: 8"""
    max: Amount | None = None
    """The most; uniform draws end here. Tokens and turns need one.
    Unit: of the key. Default: none. Example: 8, distribution: geometric, mean: 4, sigma: null"""

    def _find_problems(self) -> Problems:
        needed, optional = _PARAMETERS[self.distribution]
        for name in ("mean", "sigma", "min", "max"):
            given = getattr(self, name) is not None
            if given and name not in needed | optional:
                yield name, f"is not read by {self.distribution}; remove it"
            if not given and name in needed:
                yield "distribution", f"needs {' and '.join(sorted(needed))}; give {name}"
        if self.distribution == "geometric" and self.mean is not None and self.mean < 1:
            yield "mean", "is below 1, the least that geometric draws; use 1 or more"
        if self.distribution == "lognormal" and self.mean == 0:
            yield "mean", "is 0, and lognormal draws are above it; use a larger number"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield "max", f"is below min = {self.min:g}; swap them"

    @property
    def least(self) -> float:
        """The smallest number that may be drawn."""
        return self.mean or 0.0 if self.distribution == "constant" else self.min or 0.0

    @property
    def most(self) -> float:
        """The largest number that may be drawn."""
        if self.distribution == "constant":
            return self.mean or 0.0
        return math.inf if self.max is None else self.max


_PARAMETERS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "constant": (frozenset({"mean"}), frozenset()),
    "uniform": (frozenset({"min", "max"}), frozenset()),
    "geometric": (frozenset({"mean"}), frozenset({"min", "max"})),
    "exponential": (frozenset({"mean"}), frozenset({"min", "max"})),
    "lognormal": (frozenset({"mean", "sigma"}), frozenset({"min", "max"})),
}
"""Distribution -> the parameters that it needs, and those that it may have."""


def _number_to_draw(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"distribution": "constant", "mean": value}
    if not isinstance(value, Mapping | Draw):
        text = "is not a number or a distribution; write one such as 12 or"
        text += " {distribution: uniform, min: 4, max: 8}"
        raise PydanticCustomError("text_rule", "{text}", {"text": text})
    return value


DrawField = Annotated[Draw, BeforeValidator(_number_to_draw, json_schema_input_type=float | Draw)]
"""A distribution, or one number that is always drawn."""


class ConversationsConfig(MeasureOptions):
    """`benchmark.conversations`: what a prefix cache between turns reuses, and what that changes.

    Every turn's prompt is the whole conversation so far and a new part. A prefix cache of
    ``budget`` bytes keeps the K/V of past prompts and replies, and drops what was used least
    recently. The text is held-out text of the trial's data.
    """

    count: PositiveInt = 32
    """Conversations. Unit: conversations. Example: 64"""
    turns: DrawField = Draw(distribution="constant", mean=5)
    """Turns of a conversation. It ends earlier where the next would not fit in block_size.
    Unit: turns. Default: 5. Example: {distribution: geometric, mean: 4, max: 8}"""
    system_tokens: NonNegativeInt = 0
    """Tokens with which all conversations begin alike. Unit: tokens. Example: 32"""
    prompt_tokens: DrawField = Draw(distribution="constant", mean=16)
    """New tokens of a turn's prompt.
    Unit: tokens. Default: 16. Example: {distribution: lognormal, mean: 24, sigma: 0.5, max: 64}"""
    reply_tokens: DrawField = Draw(distribution="constant", mean=8)
    """Tokens of a reply, which is the text's own.
    Unit: tokens. Default: 8. Example: {distribution: geometric, mean: 8, max: 32}"""
    start_seconds: DrawField = Draw(distribution="exponential", mean=10)
    """From the start of a conversation to the start of the next.
    Unit: seconds. Default: exponential, mean 10. Example: {distribution: exponential, mean: 5}"""
    think_seconds: DrawField = Draw(distribution="exponential", mean=30)
    """From one turn of a conversation to the next. Replies take no time, so only the ratio to
    start_seconds matters: it decides how conversations interleave.
    Unit: seconds. Default: exponential, mean 30. Example: {distribution: exponential, mean: 60}"""
    seed: NonNegativeInt = 0
    """Of the load. It does not follow a sweep's seeds: all trials serve one load. Example: 1"""
    budget: PositiveInt | None = None
    """Bytes of the prefix cache, at which the metrics are measured.
    Unit: bytes. Default: unlimited. Example: 1e6"""
    budgets: TupleOf[PositiveInt] = ()
    """Further budgets of the curve of the hit rate, in increasing order.
    Unit: bytes. Default: 1/64 to all of what the load fills, by doubling. Example: [2.5e5, 1e6,
    4e6]"""
    snapshot_tokens: PositiveInt = 64
    """Beside the ends of turns, windows are kept every so many tokens. Unit: tokens. Example: 32"""
    measured: PositiveInt = 8
    """The first conversations, which the model itself serves, warm and cold, for times and the
    reuse gap.
    Unit: conversations. Example: 16"""

    def _find_problems(self) -> Problems:
        for name in ("turns", "prompt_tokens", "reply_tokens"):
            draw: Draw = getattr(self, name)
            if math.isinf(draw.most):
                yield name, "has no largest value; give it a max"
            elif draw.most < 1:
                yield name, f"is at most {draw.most:g}; use 1 or more"
        if list(self.budgets) != sorted(set(self.budgets)):
            yield "budgets", f"does not increase; use {sorted(set(self.budgets))}"

    def find_length_problems(self, block_size: int) -> Problems:
        parts = self.prompt_tokens, self.reply_tokens
        turn = sum(max(1, round(part.least)) for part in parts)
        least = self.system_tokens + max(1, round(self.turns.least)) * turn
        largest_turn = sum(round(part.most) for part in parts)  # as they are drawn
        if least > block_size:
            text = f"and the tokens of a turn make {least:,.0f} or more, over block_size"
            yield "turns", f"{text} = {block_size}; use fewer, or shorter prompts and replies"
        elif self.system_tokens + largest_turn > block_size:
            text = f"and reply_tokens may exceed block_size = {block_size} in the first turn"
            yield "prompt_tokens", f"{text}; lower a max"

    def find_text_need(self, block_size: int) -> TextNeed:
        """Return how many tokens are enough: each stretch begins at a place of its own."""
        return TextNeed("count", self.count, block_size + self.count)

    def identity(self) -> dict[str, Any]:
        # keys of earlier versions, which are part of the ids of trials
        return {**super().identity(), "trace": None, "block_tokens": None}


class ConversationsFields(SpecModel):
    """What `benchmark` gets."""

    omitted_defaults = frozenset({"conversations"})

    conversations: ConversationsConfig | None = None
    """A load of conversations, and what a prefix cache reuses between their turns.
    Default: none. Example: {turns: 4}"""


class ReuseFields(SpecModel):
    """What a line of a benchmark gets."""

    turn: int | None = None
    """Of a conversation, from 1."""
    budget_bytes: int | None = None
    """Of the prefix cache; null if it is unlimited."""


_FOLDER = "kvlab.extensions.conversations"

MEASURE = MeasureEntry(
    f"{_FOLDER}.measure", "what a prefix cache reuses between turns, by budget", "key",
    added_by="load", reads=("text",), options=ConversationsConfig,
    figures=f"{_FOLDER}.section:draw_reuse",
    example="bench gpt2 --only conversations --load turns=5 prompt_tokens=96 reply_tokens=32",
)  # fmt: skip
