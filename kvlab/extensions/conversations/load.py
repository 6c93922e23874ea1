"""Loads of conversations: requests in order of time, each with its whole prompt and its reply.

A load is drawn from distributions. Its text is real: a conversation is one stretch of a text, so
that its replies are the text's own. What a cache without limits could reuse of a load follows from
the tokens alone.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.errors import DataError
from kvlab.extensions.conversations.config import ConversationsConfig, Draw

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One turn of a conversation.

    Attributes:
        conversation: its number.
        turn: from 1.
        seconds: when it arrives.
        prompt: the whole conversation up to the reply.
        reply: what follows.
    """

    conversation: int
    turn: int
    seconds: float
    prompt: list[int]
    reply: list[int]

    @property
    def context(self) -> list[int]:
        """The prompt and the reply: what a prefix cache keeps of this turn."""
        return [*self.prompt, *self.reply]


@dataclass(frozen=True)
class Load:
    """Requests in order of time."""

    requests: tuple[Request, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def select_first(self, count: int) -> "Load":
        """Return the load of the first ``count`` conversations alone."""
        firsts = list(dict.fromkeys(request.conversation for request in self.requests))[:count]
        kept = tuple(one for one in self.requests if one.conversation in set(firsts))
        return Load(kept)

    def last_contexts(self) -> list[list[int]]:
        """Return every conversation at its end, in the order of their last turns."""
        ends: dict[int, list[int]] = {}
        for request in self.requests:
            ends.pop(request.conversation, None)
            ends[request.conversation] = request.context
        return list(ends.values())


def make_load(
    config: ConversationsConfig, text: Sequence[int] | npt.NDArray[Any], block_size: int
) -> Load:
    """Return the load that ``config`` describes, over the tokens of ``text``.

    Raises:
        DataError: the text is too short for it.
    """
    tokens, rng = np.asarray(text, dtype=np.int64), np.random.default_rng(config.seed)
    turns = draw_whole(config.turns, config.count, rng)
    starts = np.cumsum(draw(config.start_seconds, config.count, rng))
    shapes = []
    for count in turns.tolist():
        prompts, replies = (draw_whole(d, count, rng) for d in (config.prompt_tokens,
                                                                config.reply_tokens))  # fmt: skip
        gaps = draw(config.think_seconds, count, rng)
        fits = config.system_tokens + np.cumsum(prompts + replies) <= block_size
        shapes.append((prompts[fits], replies[fits], np.cumsum(gaps)[fits] - gaps[0]))
    lengths = [int((prompts + replies).sum()) for prompts, replies, _ in shapes]
    places = _draw_places(tokens, [config.system_tokens, *lengths], rng)
    system = tokens[places[0] : places[0] + config.system_tokens]
    requests = []
    for number, (prompts, replies, times) in enumerate(shapes):
        own = tokens[places[number + 1] :][: lengths[number]]
        whole = np.concatenate([system, own]).tolist()
        ends = (config.system_tokens + np.cumsum(prompts + replies)).tolist()
        turns_of_it = zip(ends, replies.tolist(), (starts[number] + times).tolist(), strict=True)
        for turn, (end, reply, seconds) in enumerate(turns_of_it, 1):
            prompt, answer = whole[: end - reply], whole[end - reply : end]
            requests.append(Request(number, turn, seconds, prompt, answer))
    requests.sort(key=lambda one: (one.seconds, one.turn, one.conversation))
    return Load(tuple(requests))


def draw(spread: Draw, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw ``count`` numbers, those outside its bounds set to them."""
    mean, sigma = spread.mean or 0.0, spread.sigma or 0.0
    match spread.distribution:
        case "constant":
            return np.full(count, mean)
        case "uniform":
            return rng.uniform(spread.min or 0.0, spread.max or 0.0, count)
        case "geometric":
            drawn = rng.geometric(1 / mean, count).astype(np.float64)
        case "exponential":
            drawn = rng.exponential(mean, count)
        case "lognormal":
            drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, spread.min, spread.max)


def draw_whole(spread: Draw, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw ``count`` whole numbers of at least 1. Those of a uniform draw are equally likely."""
    if spread.distribution == "uniform":
        low, high = max(1, round(spread.min or 0)), max(1, round(spread.max or 0))
        return rng.integers(low, high + 1, count)
    return np.maximum(1, np.rint(draw(spread, count, rng))).astype(np.int64)


def _draw_places(text: Tokens, lengths: list[int], rng: np.random.Generator) -> list[int]:
    """Return where stretches of these lengths begin in the text, each at a place of its own.

    Raises:
        DataError: the text is too short.
    """
    longest = max(lengths)
    places = len(text) - longest + 1
    if places < len(lengths):
        raise DataError(
            f"benchmark.conversations needs {longest + len(lengths) - 1:,} tokens of held-out text"
            f" and there are {len(text):,}; use fewer or shorter conversations, or more text"
        )
    found: list[int] = rng.choice(places, len(lengths), replace=False).tolist()
    return found


# What could be reused


def find_exact_hits(load: Load) -> list[int]:
    """Return the hit of every request in a cache without limits.

    It is the longest proper prefix of the prompt, which leaves a token, that any earlier context
    has. Contexts are kept sorted as bytes, so the longest common prefix is that with a neighbour.
    """
    contexts: list[bytes] = []
    hits = []
    for request in load.requests:
        # big-endian sorts as the numbers do
        key, context = (np.asarray(tokens, dtype=">u4").tobytes()
                        for tokens in (request.prompt, request.context))  # fmt: skip
        place = bisect.bisect_left(contexts, key)
        neighbours = contexts[max(0, place - 1) : place + 1]
        longest = max((_common_tokens(key, other) for other in neighbours), default=0)
        hits.append(min(longest, len(request.prompt) - 1))
        bisect.insort(contexts, context)
    return hits


def _common_tokens(one: bytes, other: bytes) -> int:
    count = min(len(one), len(other)) // 4
    a, b = (np.frombuffer(part, dtype=">u4", count=count) for part in (one, other))
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else count
