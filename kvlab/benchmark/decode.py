"""Greedy decoding of random prompts, timed step by step.

B rows, L prompt tokens, N new tokens. Nothing is sampled and nothing is read back while the
clock runs, so that a device is never made to wait for the program.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.benchmark.timing import Clock
from kvlab.cache import KVCache
from kvlab.model import GPT
from kvlab.model.decode import make_decoder
from kvlab.model.generate import prefill
from kvlab.spec.parts import ServingConfig

PROMPT_SEED = 0


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the prompt and the first token, then each further token."""

    first: float
    steps: list[float]


class Decoder:
    """Decodes one model, served in one way, as `kvlab generate` does."""

    def __init__(self, model: GPT, serving: ServingConfig):
        self.model, self.serving = model, serving

    def new_cache(self, batch_size: int, length: int) -> KVCache:
        """A cache that holds ``length`` tokens a row."""
        return self.model.new_cache(batch_size, length, self.serving)

    @torch.inference_mode()
    def decode(self, cache: KVCache, new_tokens: int) -> Timing:
        """Fills the cache: prefill of all but ``new_tokens``, which gives the first token, then
        that many steps of one token each. Between the two the step is made ready, untimed: on
        CUDA its graph is captured."""
        cache.reset()
        prompt = self._tokens(cache.batch_size, cache.max_length - new_tokens)
        clock = Clock(self.model.device)
        clock.mark()
        token = prefill(self.model, prompt, cache).argmax(-1)
        clock.mark()
        step = make_decoder(self.model, cache)
        clock.mark()
        for _ in range(new_tokens):
            token = step(token).argmax(-1)
            clock.mark()
        first, _ready, *steps = clock.intervals()
        return Timing(first, steps)

    @torch.inference_mode()
    def decode_again(self, length: int) -> float:
        """Seconds of one step of one sequence with no cache: a full pass over ``length`` tokens."""
        tokens = self._tokens(1, length)
        clock = Clock(self.model.device)
        clock.mark()
        prefill(self.model, tokens, None).argmax(-1)
        clock.mark()
        return clock.intervals()[0]

    def _tokens(self, batch_size: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        shape = (batch_size, length)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        return tokens.to(self.model.device)
