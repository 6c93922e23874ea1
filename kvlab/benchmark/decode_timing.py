"""Time on a device that may run behind the program."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill
from kvlab.spec import ServingConfig


class DeviceClock:
    """Marks moments of a device's work.

    On CUDA a mark is an event in the stream: the device is not made to wait, and what is
    measured is its own time, with the gaps in which it had nothing to do.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds between one mark and the next; waits for the device."""
        if self._is_cuda:
            self._events[-1].synchronize()
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            return [first.elapsed_time(second) / 1000.0 for first, second in pairs]
        pairs_of_moments = zip(self._moments[:-1], self._moments[1:], strict=True)
        return [second - first for first, second in pairs_of_moments]


# Greedy decoding of random prompts, timed step by step.
#
# B rows, L prompt tokens, N new tokens. Nothing is sampled and nothing is read back while the
# clock runs, so that a device is never made to wait for the program.


PROMPT_SEED = 0


@dataclass(frozen=True)
class DecodeTiming:
    """Seconds of one run: the prompt and the first token, then each further token."""

    first: float
    steps: list[float]


class TimedDecoder:
    """Decodes one model, served in one way, as `kvlab generate` does."""

    def __init__(self, model: GPT, serving: ServingConfig):
        self.model, self.serving = model, serving

    def new_cache(self, batch_size: int, length: int) -> KVCache:
        """A cache that holds ``length`` tokens a row."""
        return self.model.new_cache(batch_size, length, self.serving)

    @torch.inference_mode()
    def decode(self, cache: KVCache, new_tokens: int) -> DecodeTiming:
        """Fills the cache: prefill of all but ``new_tokens``, which gives the first token, then
        that many steps of one token each. Between the two the step is made ready, untimed: on
        CUDA its graph is captured."""
        cache.reset()
        prompt = self._tokens(cache.batch_size, cache.max_length - new_tokens)
        clock = DeviceClock(self.model.device)
        clock.mark()
        token = prefill(self.model, prompt, cache).argmax(-1)
        clock.mark()
        step = make_decoder(self.model, cache)
        clock.mark()
        for _ in range(new_tokens):
            token = step(token).argmax(-1)
            clock.mark()
        first, _ready, *steps = clock.intervals()
        return DecodeTiming(first, steps)

    @torch.inference_mode()
    def decode_again(self, length: int) -> float:
        """Seconds of one step of one sequence with no cache: a full pass over ``length`` tokens."""
        tokens = self._tokens(1, length)
        clock = DeviceClock(self.model.device)
        clock.mark()
        prefill(self.model, tokens, None).argmax(-1)
        clock.mark()
        return clock.intervals()[0]

    def _tokens(self, batch_size: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        shape = (batch_size, length)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        return tokens.to(self.model.device)
