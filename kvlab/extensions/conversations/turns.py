"""Turns of a conversation, each of which takes over what earlier ones have stored.

    turn = Turn(prompt, cache, prefix_cache, run, weights="...")
    logits = turn.prefill()             # what run returned; turn.hit tokens were restored
    ...                                 # decode, and append what is chosen to turn.tokens
    turn.finish()                       # store prompt and reply

Shapes: B rows, V vocab_size.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.extensions.conversations.prefix_cache import PrefixCache
from kvlab.model.generate import prefill
from kvlab.model.gpt import GPT


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
