"""`benchmark.conversations`: a load of conversations whose turns reuse the K/V of earlier ones.

The load is drawn from stated distributions, or read from a trace: a JSONL file with a line for
each request, whose prompt is a list of ids of blocks of tokens. Equal ids are equal text. Two
public formats are read:

- Mooncake's (Qin et al., FAST 2025): ``timestamp`` in ms, ``input_length``, ``output_length`` and
  ``hash_ids`` of 512 tokens each;
- Qwen-Bailian's (Wang et al., USENIX ATC 2025, arXiv 2506.02634): the same with ``timestamp`` in
  seconds, ids of 16 tokens each, and ``chat_id``, ``parent_chat_id`` and ``turn``.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvlab.spec.measure_options import MeasureEntry, MeasureOptions, TextNeed
from kvlab.spec.spec_model import NonNegativeInt, PositiveInt, Problems, SpecModel, TupleOf
from kvlab.spec.validation_errors import list_field_errors

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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"distribution": "constant", "mean": value} if is_number else value


DrawField = Annotated[Draw, BeforeValidator(_number_to_draw, json_schema_input_type=float | Draw)]
"""A distribution, or one number that is always drawn."""


_REPLACED_BY_TRACE = (
    "turns", "system_tokens", "prompt_tokens", "reply_tokens", "start_seconds", "think_seconds",
)  # fmt: skip


class ConversationsConfig(MeasureOptions):
    """`benchmark.conversations`: what a prefix cache between turns reuses, and what that changes.

    Every turn's prompt is the whole conversation so far and a new part. A prefix cache of
    ``budget`` bytes keeps the K/V of past prompts and replies, and drops what was used least
    recently. The text is held-out text of the trial's data.
    """

    path_keys = frozenset({"trace"})

    count: PositiveInt = 32
    """Conversations; with a trace, its first requests. Unit: conversations. Example: 64"""
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
    trace: str | None = None
    """JSONL file of requests with hash ids, as published of Mooncake and of Qwen-Bailian, relative
    to the spec's file. It replaces the six keys above.
    Default: none. Example: conversation_trace.jsonl"""
    block_tokens: PositiveInt | None = None
    """Tokens that one hash id of the trace becomes. All its lengths are scaled alike, so that a
    small model can serve it. Requests over block_size are left out.
    Unit: tokens. Default: the trace's own, 512 or 16. Example: 8, trace:
    conversation_trace.jsonl"""
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
    """The first conversations (of a trace: requests), which the model itself serves, warm and cold,
    for times and the reuse gap.
    Unit: conversations. Example: 16"""

    def _find_problems(self) -> Problems:
        if self.trace is not None:
            fields = type(self).model_fields
            for name in _REPLACED_BY_TRACE:
                if name in self.model_fields_set and getattr(self, name) != fields[name].default:
                    yield name, "is given by the trace; remove one of the two"
        elif self.block_tokens is not None:
            yield "block_tokens", "is read only with a trace; name one, or remove it"
        for name in ("turns", "prompt_tokens", "reply_tokens"):
            draw: Draw = getattr(self, name)
            if math.isinf(draw.most):
                yield name, "has no largest value; give it a max"
            elif draw.most < 1:
                yield name, f"is at most {draw.most:g}; use 1 or more"
        if list(self.budgets) != sorted(set(self.budgets)):
            yield "budgets", f"does not increase; use {sorted(set(self.budgets))}"

    def find_length_problems(self, block_size: int) -> Problems:
        if self.trace is not None:
            return
        turn = max(1, self.prompt_tokens.least) + max(1, self.reply_tokens.least)
        least = self.system_tokens + max(1, self.turns.least) * turn
        largest_turn = self.prompt_tokens.most + self.reply_tokens.most
        if least > block_size:
            text = f"and the tokens of a turn make {least:,.0f} or more, over block_size"
            yield "turns", f"{text} = {block_size}; use fewer, or shorter prompts and replies"
        elif self.system_tokens + largest_turn > block_size:
            text = f"and reply_tokens may exceed block_size = {block_size} in the first turn"
            yield "prompt_tokens", f"{text}; lower a max"

    def find_file_problems(self) -> Problems:
        if self.trace is not None:
            try:
                read_trace(self.trace, self.count)
            except LookupError as error:
                yield "trace", str(error)

    def find_text_need(self, block_size: int) -> TextNeed:
        """Return how many tokens are enough: each stretch begins at a place of its own."""
        if self.trace is None:
            return TextNeed("count", self.count, block_size + self.count)
        trace = read_trace(self.trace, self.count)
        blocks = {name for request in trace.requests for name in request.blocks}
        longest = max(block_size, self.block_tokens or trace.block_tokens)
        tokens = longest + len(blocks) + len(trace.requests)
        return TextNeed("trace", self.trace, tokens)

    def identity(self) -> dict[str, Any]:
        """Return what is measured: a trace enters by its contents."""
        facts = super().identity()
        if self.trace is not None:
            facts["trace"] = hashlib.sha256(Path(self.trace).read_bytes()).hexdigest()
            for name in _REPLACED_BY_TRACE:
                del facts[name]
        return facts


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


# Traces


class TracedRequest(BaseModel):
    """One line of a trace, with the keys that are read of either format.

    Attributes:
        prompt_tokens, reply_tokens: at the trace's own block size.
        blocks: ids of the prompt's blocks; the last one may be shorter.
        turn: of its conversation, from 1; 1 where the trace does not say.
        chat, parent: of this request and of the one that it continues; None where unknown.
    """

    model_config = ConfigDict(strict=True)

    seconds: Annotated[float, Field(alias="timestamp", ge=0, le=MAX_DRAWN, allow_inf_nan=False)]
    prompt_tokens: Annotated[int, Field(alias="input_length", ge=1, le=MAX_DRAWN)]
    reply_tokens: Annotated[int, Field(alias="output_length", ge=0, le=MAX_DRAWN)]
    blocks: Annotated[list[int], Field(alias="hash_ids")]
    turn: Annotated[int, Field(ge=1)] = 1
    chat: Annotated[int | None, Field(alias="chat_id")] = None
    parent: Annotated[int | None, Field(alias="parent_chat_id")] = None


@dataclass(frozen=True)
class Trace:
    """The first requests of a trace, in order of time.

    Attributes:
        has_turns: whether it says which request continues which.
    """

    block_tokens: int
    has_turns: bool
    requests: tuple[TracedRequest, ...]


def read_trace(path: str, count: int) -> Trace:
    """Return the first ``count`` requests of a trace.

    Raises:
        LookupError: it is no file, or a line is not of a known format; the message has the file,
            the line and what to write.
    """
    try:
        stat = Path(path).stat()
        return _read_trace(path, count, stat.st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise LookupError(f"{path} cannot be read ({reason}); name a JSONL file") from None


@lru_cache(maxsize=4)
def _read_trace(path: str, count: int, _modified: int) -> Trace:
    with Path(path).open(encoding="utf-8") as file:
        lines = [(n, line) for n, line in enumerate(islice(file, count), 1) if line.strip()]
    if not lines:
        raise LookupError(f"{path} is empty; name a trace with a request in each line")
    requests = [_parse_line(path, number, text) for number, text in lines]
    has_turns = requests[0].chat is not None
    block, scale = (16, 1.0) if has_turns else (512, 1e-3)
    for (number, _), one in zip(lines, requests, strict=True):
        count, most = len(one.blocks), -(-one.prompt_tokens // block)
        if not max(1, one.prompt_tokens // block) <= count <= most:
            text = f"hash_ids has {count} ids where input_length = {one.prompt_tokens} has {most}"
            text = f"{text} blocks of {block} tokens; use one id for each block"
            raise LookupError(f"{path}:{number}: {text}")
        one.seconds, one.reply_tokens = one.seconds * scale, max(1, one.reply_tokens)
        one.turn = one.turn if has_turns else 1
        one.parent = None if one.parent == -1 else one.parent
    return Trace(block, has_turns, tuple(sorted(requests, key=lambda one: one.seconds)))


def _parse_line(path: str, number: int, text: str) -> TracedRequest:
    try:
        row = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        message = f"{error.msg}; a line is one JSON object"
        raise LookupError(f"{path}:{number}:{error.colno}: {message}") from None
    if not isinstance(row, dict):
        raise LookupError(f"{path}:{number}: is not a JSON object; write one in each line")
    try:
        return TracedRequest.model_validate(row)
    except ValidationError as error:
        first = list_field_errors(error, TracedRequest, row)[0]
        raise LookupError(f"{path}:{number}: {first.message}") from None
