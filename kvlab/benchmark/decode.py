"""Greedy decoding of random prompts, timed step by step.

B rows, P prompt tokens, N new tokens. Nothing is sampled and nothing is read back while the
clock runs, so that a device is never made to wait for the program.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.benchmark.timing import Clock
from kvlab.cache import KVCache
from kvlab.model import GPT
from kvlab.spec.parts import BenchmarkConfig, ServingConfig

PROMPT_SEED = 0


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the prompt and the first token, then each further token."""

    first: float
    steps: list[float]


class Decoder:
    """Decodes one model on the benchmark's prompts.

    Args:
        serving: how the cache is stored and tied.
        config: lengths; its batch sizes are given with each call.
    """

    def __init__(self, model: GPT, serving: ServingConfig, config: BenchmarkConfig):
        self.model, self._serving = model, serving
        self.prompt_tokens, self.new_tokens = config.prompt_tokens, config.new_tokens

    def new_cache(self, batch_size: int) -> KVCache:
        """A cache that holds all P + N tokens."""
        return self.model.new_cache(batch_size, self.prompt_tokens + self.new_tokens, self._serving)

    @torch.inference_mode()
    def decode(self, batch_size: int, cache: KVCache) -> Timing:
        """Prefill gives the first token; N steps of one token each give the next N."""
        cache.reset()
        prompt = self._tokens(batch_size, self.prompt_tokens)
        clock = Clock(self.model.device)
        clock.mark()
        token = self._next(prompt, cache)
        clock.mark()
        for _ in range(self.new_tokens):
            token = self._next(token, cache)
            clock.mark()
        first, *steps = clock.intervals()
        return Timing(first, steps)

    @torch.inference_mode()
    def decode_again(self, step: int) -> float:
        """Seconds of step ``step`` (0 to N - 1) of one sequence with no cache: a full forward
        pass over all tokens so far."""
        tokens = self._tokens(1, self.prompt_tokens + 1 + step)
        clock = Clock(self.model.device)
        clock.mark()
        self._next(tokens, None)
        clock.mark()
        return clock.intervals()[0]

    def _next(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """The likeliest next token (B, 1); logits are made of the last position alone."""
        last = self.model.hidden(tokens, cache=cache)[:, -1:]
        return self.model.head(last).argmax(-1)

    def _tokens(self, batch_size: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        shape = (batch_size, length)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        return tokens.to(self.model.device)
