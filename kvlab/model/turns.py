"""One turn of a conversation: take over what earlier turns stored, compute the rest, store that.

    turn = Turn(model, prompt, cache, prefix_cache, weights="...")
    logits = turn.prefill()             # of the prompt's last token; turn.hit tokens were restored
    ...                                 # decode, and append what is chosen to turn.tokens
    turn.finish()                       # store prompt and reply

Shapes: B rows, V vocab_size.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kvlab.cache import KVCache, PrefixCache
from kvlab.model.gpt import GPT


class Turn:
    """One prompt and its reply, in a cache of one row.

    Args:
        prompt: the conversation so far, with what is new.
        cache: empty, of one row, with place for the prompt and the whole reply.
        weights: names the model's weights.

    Attributes:
        tokens: the prompt, then what is appended of the reply.
        hit: tokens that were restored; None before `prefill`.
        pass_ends: where the passes of the prefill ended.
    """

    def __init__(
        self,
        model: GPT,
        prompt: Sequence[int],
        cache: KVCache,
        prefix_cache: PrefixCache,
        *,
        weights: Hashable,
    ):
        self._model, self._cache = model, cache
        self._prefix_cache, self._weights = prefix_cache, weights
        self.tokens = list(prompt)
        self.hit: int | None = None
        self.pass_ends: list[int] = []

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Restore the longest stored prefix and run the rest; return the logits (1, V) after it.

        Between two passes a snapshot is stored, where the layout needs one.
        """
        self.hit = self._prefix_cache.restore(self.tokens, self._cache, weights=self._weights)
        self.pass_ends = self._prefix_cache.list_pass_ends(
            self.tokens, self.hit, self._cache, weights=self._weights
        )
        for end in self.pass_ends:
            states = self._run(end)
            if end < len(self.tokens):
                self._prefix_cache.insert(self.tokens, self._cache, weights=self._weights)
        return self._model.compute_logits(states)

    @torch.inference_mode()
    def finish(self) -> None:
        """Store the prompt and the reply, so that a next turn takes over all of it.

        The last token of a reply has not been run, and is run for that, if there is place.
        """
        end = min(len(self.tokens), self._cache.max_length)
        if end > self._cache.length:
            self._run(end)
        self._prefix_cache.insert(self.tokens, self._cache, weights=self._weights)

    def _run(self, end: int) -> Tensor:
        """Run the tokens up to ``end`` in one pass; return the last one's hidden state (1, E)."""
        tokens = torch.tensor([self.tokens[self._cache.length : end]], device=self._model.device)
        last = torch.tensor([tokens.shape[1] - 1], device=self._model.device)
        return self._model.hidden_states(tokens, self._cache, token_indices=last)
