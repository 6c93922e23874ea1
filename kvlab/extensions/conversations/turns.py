"""Turns of a conversation, each of which takes over what earlier ones have stored.

    turn = Turn(prompt, cache, prefix_cache, run, weights="...")
    logits = turn.prefill()             # what run returned; turn.hit tokens were restored
    ...                                 # decode, and append what is chosen to turn.tokens
    turn.finish()                       # store prompt and reply

Shapes: B rows, V vocab_size.
"""

import time
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.extensions.conversations.prefix_cache import PrefixCache, PrefixTree
from kvlab.model.generate import Decoder, Sampling, check_vocabulary, make_decoder, prefill, sample
from kvlab.model.gpt import GPT, check_positions
from kvlab.spec import ServingConfig


class Turn:
    """One prompt and its reply, in a cache of one row.

    Args:
        prompt: the conversation so far, with what is new.
        cache: empty, of one row, with place for the prompt and the whole reply.
        run: runs tokens after those that the cache holds, in one pass.
        weights: names the model's weights.

    Attributes:
        tokens: the prompt, then what is appended of the reply.
        hit: tokens that were restored; 0 before `prefill`.
        pass_ends: where the passes of the prefill ended.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        cache: KVCache,
        prefix_cache: PrefixCache,
        run: Callable[[list[int]], Any],
        *,
        weights: Hashable,
    ):
        self._cache, self._run = cache, run
        self._prefix_cache, self._weights = prefix_cache, weights
        self.tokens = list(prompt)
        self.hit = 0
        self.pass_ends: list[int] = []

    @torch.inference_mode()
    def prefill(self, *, stores: bool = True) -> Any:
        """Restore the longest stored prefix and run the rest; return what its last pass returned.

        Args:
            stores: whether to store a snapshot between two passes, where the layout needs one.
        """
        self.hit = self._prefix_cache.restore(self.tokens, self._cache, weights=self._weights)
        self.pass_ends = self._prefix_cache.list_pass_ends(
            self.tokens, self.hit, self._cache, weights=self._weights
        )
        for end in self.pass_ends:
            out = self._run(self.tokens[self._cache.length : end])
            if stores and end < len(self.tokens):
                self._prefix_cache.insert(self.tokens, self._cache, weights=self._weights)
        return out

    @torch.inference_mode()
    def finish(self) -> None:
        """Store the prompt and the reply, so that a next turn takes over all of it.

        The last token of a reply has not been run, and is run for that, if there is place.
        """
        end = min(len(self.tokens), self._cache.max_length)
        if end > self._cache.length:
            self._run(self.tokens[self._cache.length : end])
        self._prefix_cache.insert(self.tokens, self._cache, weights=self._weights)


def run_tokens(model: GPT, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    """Run tokens after those of ``cache`` in one pass; return the logits (1, V) after the last."""
    return prefill(model, torch.tensor([tokens], device=model.device), cache)


@dataclass(frozen=True)
class Reuse:
    """What one turn took over.

    Attributes:
        prompt_tokens: of the conversation so far, with what was new.
        hit_tokens, hit_bytes: how much of it was restored.
        first_token_seconds: from the prompt to the first token of the reply.
    """

    prompt_tokens: int
    hit_tokens: int
    hit_bytes: int
    first_token_seconds: float


class Conversation:
    """A conversation with a model, token by token.

    Args:
        start: tokens that it begins with.
        weights: names the model's weights.
        serving: how K/V are stored and tied.
        seed: of the draws.

    Attributes:
        tokens: all so far, those of stopped replies too.
        reuse: what the latest reply took over.
    """

    def __init__(
        self,
        model: GPT,
        prefix_cache: PrefixCache,
        start: Sequence[int] = (),
        *,
        weights: Hashable,
        serving: ServingConfig | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
    ):
        self._model, self._prefix_cache, self._weights = model, prefix_cache, weights
        self._serving, self._sampling = serving, sampling or Sampling()
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._kept: tuple[KVCache, Decoder | None] | None = None
        self.tokens = list(start)
        self.reuse: Reuse | None = None

    def reply(
        self, new: Sequence[int], new_tokens: int, stop: Collection[int] = ()
    ) -> Generator[int, None, None]:
        """Add ``new`` to the conversation and yield the tokens of a reply to it.

        A reply ends after a token of ``stop``, or if the iterator is closed; what was yielded is
        then part of the conversation. If it is interrupted in between, nothing of the turn is.

        Raises:
            ValueError: the tokens are none, unknown ones, or exceed the learned positions.
        """
        prompt, config = [*self.tokens, *new], self._model.config
        if not prompt:
            raise ValueError("the conversation is empty; begin it with at least one token")
        check_vocabulary(config, prompt)
        check_positions(config, len(prompt), "begin a new conversation")
        if config.position_scheme.has_embedding:
            new_tokens = min(new_tokens, config.block_size + 1 - len(prompt))
        start = time.perf_counter()
        # A cache and its decoder, which has captured graphs on CUDA, are kept from turn to turn.
        # They are not kept if a turn is interrupted, whose pass may have written half of it.
        length, kept, self._kept = len(prompt) + new_tokens, self._kept, None
        most = config.block_size if config.position_scheme.has_embedding else 2 * length
        if kept is not None and kept[0].max_length >= min(length, most):
            cache, decoder = kept
            cache.reset()
        else:
            cache, decoder = self._model.new_cache(1, min(2 * length, most), self._serving), None
        run = partial(run_tokens, self._model, cache)
        turn = Turn(prompt, cache, self._prefix_cache, run, weights=self._weights)
        logits = turn.prefill()
        while True:
            turn.tokens.append(int(sample(logits, self._sampling, self._generator)))
            if len(turn.tokens) == len(prompt) + 1:
                hit_bytes = PrefixTree(cache).state_bytes(turn.hit) if turn.hit else 0
                seconds = time.perf_counter() - start
                self.reuse = Reuse(len(prompt), turn.hit, hit_bytes, seconds)
            try:
                yield turn.tokens[-1]
            except GeneratorExit:
                break
            if turn.tokens[-1] in stop or len(turn.tokens) == len(prompt) + new_tokens:
                break
            with torch.inference_mode():
                decoder = decoder or make_decoder(self._model, cache)
                logits = decoder(torch.tensor(turn.tokens[-1:], device=self._model.device))
        turn.finish()
        self._kept = cache, decoder
        self.tokens = turn.tokens
