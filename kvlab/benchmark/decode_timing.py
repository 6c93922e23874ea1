"""Time greedy decoding of random prompts, step by step.

Nothing is sampled and nothing is read back while the clock runs, so a device never waits for
the program.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill
from kvlab.spec import ServingConfig

PROMPT_SEED = 0


class DeviceClock:
    """Records marks in a device's work and returns the times between them.

    On CUDA a mark is an event in the stream. It does not synchronize the device, and what it
    measures is the device's own time, idle gaps included.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Record a mark after the work that was submitted so far."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the seconds between successive marks; synchronizes with the device."""
        if self._is_cuda:
            self._events[-1].synchronize()
            events = zip(self._events[:-1], self._events[1:], strict=True)
            return [first.elapsed_time(second) / 1000.0 for first, second in events]
        times = zip(self._times[:-1], self._times[1:], strict=True)
        return [second - first for first, second in times]


@dataclass(frozen=True)
class DecodeTiming:
    """Seconds of one run.

    Attributes:
        first: prefill, which gives the first token.
        steps: each further token.
    """

    first: float
    steps: list[float]


class TimedDecoder:
    """Decodes with one model and serving configuration, as `kvlab generate` does."""

    def __init__(self, model: GPT, serving: ServingConfig):
        self.model, self.serving = model, serving

    def new_cache(self, batch_size: int, length: int) -> KVCache:
        """Return a cache for ``length`` tokens per row."""
        return self.model.new_cache(batch_size, length, self.serving)

    @torch.inference_mode()
    def decode(self, cache: KVCache, new_tokens: int) -> DecodeTiming:
        """Prefill and decode until the cache is full.

        Preparing the decode step (on CUDA the capture of its graph) is not timed.

        Args:
            cache: is reset first; its batch size and length define the run.
            new_tokens: decode steps. The prompt is the rest of the cache's length.
        """
        cache.reset()
        prompt = self._draw_tokens(cache.batch_size, cache.max_length - new_tokens)
        clock = DeviceClock(self.model.device)
        clock.mark()
        token = prefill(self.model, prompt, cache).argmax(-1)
        clock.mark()
        step = make_decoder(self.model, cache)
        clock.mark()
        for _ in range(new_tokens):
            token = step(token).argmax(-1)
            clock.mark()
        first, _preparation, *steps = clock.intervals()
        return DecodeTiming(first, steps)

    @torch.inference_mode()
    def decode_uncached(self, length: int) -> float:
        """Return the seconds of an uncached step of one sequence: a pass over ``length`` tokens."""
        tokens = self._draw_tokens(1, length)
        clock = DeviceClock(self.model.device)
        clock.mark()
        prefill(self.model, tokens, None).argmax(-1)
        clock.mark()
        return clock.intervals()[0]

    def _draw_tokens(self, batch_size: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        shape = (batch_size, length)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        return tokens.to(self.model.device)
