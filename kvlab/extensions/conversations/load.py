"""Loads of conversations: requests in order of time, each with its whole prompt and its reply.

A load is drawn from distributions, or follows a trace's hash ids. Its text is real: a conversation
is one stretch of a text, so that its replies are the text's own. What a cache without limits could
reuse of a load follows from the tokens alone.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.errors import DataError
from kvlab.extensions.conversations.config import ConversationsConfig, Draw, Trace, read_trace

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One turn of a conversation.

    Attributes:
        conversation: its number; of a trace that does not tell conversations, that of the request.
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
    """Requests in order of time.

    Attributes:
        left_out: requests of a trace that exceed the block size.
        has_turns: whether turns are known.
    """

    requests: tuple[Request, ...]
    left_out: int = 0
    has_turns: bool = True

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def select_first(self, count: int) -> "Load":
        """Return the load of the first ``count`` conversations alone."""
        firsts = list(dict.fromkeys(request.conversation for request in self.requests))[:count]
        kept = tuple(one for one in self.requests if one.conversation in set(firsts))
        return Load(kept, has_turns=self.has_turns)

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
        DataError: the text is too short for it, or every request exceeds ``block_size``.
        LookupError: the trace cannot be read.
    """
    tokens = np.asarray(text, dtype=np.int64)
    if config.trace is not None:
        trace = read_trace(config.trace, config.count)
        return _follow_trace(trace, config, tokens, block_size)
    return _draw_load(config, tokens, block_size)


def _draw_load(config: ConversationsConfig, text: Tokens, block_size: int) -> Load:
    rng = np.random.default_rng(config.seed)
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
    places = _draw_places(text, [config.system_tokens, *lengths], rng)
    system = text[places[0] : places[0] + config.system_tokens]
    requests = []
    for number, (prompts, replies, times) in enumerate(shapes):
        own = text[places[number + 1] :][: lengths[number]]
        tokens = np.concatenate([system, own]).tolist()
        ends = (config.system_tokens + np.cumsum(prompts + replies)).tolist()
        turns_of_it = zip(ends, replies.tolist(), (starts[number] + times).tolist(), strict=True)
        for turn, (end, reply, seconds) in enumerate(turns_of_it, 1):
            prompt, answer = tokens[: end - reply], tokens[end - reply : end]
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


def _follow_trace(trace: Trace, config: ConversationsConfig, text: Tokens, block_size: int) -> Load:
    """Return a trace's requests with text that is equal where their ids are.

    A trace tells whole blocks. The reply to a request, and the end of its last block, are taken
    from the request that continues it, where the trace names one; else they are text of its own.
    """
    block = config.block_tokens or trace.block_tokens
    names = dict.fromkeys(one for request in trace.requests for one in request.blocks)
    scaled = [
        tuple(-(-n * block // trace.block_tokens) for n in (one.prompt_tokens, one.reply_tokens))
        for one in trace.requests
    ]
    fitting = [n for n, lengths in enumerate(scaled) if sum(lengths) <= block_size]
    if not fitting:
        shortest = min(map(sum, scaled))
        raise DataError(
            f"every request of {config.trace} exceeds block_size = {block_size}: the shortest has"
            f" {shortest:,} tokens; use smaller benchmark.conversations.block_tokens"
        )
    own = max(sum(scaled[n]) for n in fitting)
    rng = np.random.default_rng(config.seed)
    lengths = [block] * len(names) + [own] * len(fitting)
    places = _draw_places(text, lengths, rng)
    blocks = {name: text[place : place + block] for name, place in zip(names, places, strict=False)}
    contexts: dict[int, Tokens] = {}
    continued = _find_continuations(trace)
    for n, place in zip(reversed(fitting), reversed(places), strict=False):
        prompt, reply = scaled[n]
        told = np.concatenate([blocks[name] for name in trace.requests[n].blocks])[:prompt]
        whole = np.concatenate([told, text[place : place + own]])[: prompt + reply]
        contexts[n] = _take_over(whole, contexts.get(continued.get(n, -1)), prompt, block)
    requests = []
    for n in fitting:
        one, tokens = trace.requests[n], contexts[n].tolist()
        prompt, reply = scaled[n]
        requests.append(
            Request(n, one.turn, one.seconds, tokens[:prompt], tokens[prompt : prompt + reply])
        )
    return Load(tuple(requests), len(trace.requests) - len(fitting), has_turns=trace.has_turns)


def _find_continuations(trace: Trace) -> dict[int, int]:
    """Return the first request that continues each request, by their numbers."""
    by_chat = {one.chat: n for n, one in enumerate(trace.requests) if one.chat is not None}
    found: dict[int, int] = {}
    for n, one in enumerate(trace.requests):
        parent = None if one.parent is None else by_chat.get(one.parent)
        if parent is not None and parent < n:
            found.setdefault(parent, n)
    return found


def _take_over(whole: Tokens, later: Tokens | None, prompt: int, block: int) -> Tokens:
    """Return the prompt and reply of a request, with what its continuation says of them.

    Args:
        whole: what the trace tells of them, and text of their own.
        later: the context of the request that continues it, if there is one.
    """
    full = prompt // block * block
    if later is None or len(later) < prompt or not np.array_equal(whole[:full], later[:full]):
        return whole
    shared = min(len(later), len(whole))
    return np.concatenate([later[:shared], whole[shared:]])


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
