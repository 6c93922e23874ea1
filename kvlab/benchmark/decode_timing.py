"""Time greedy decoding of random prompts, step by step.

Nothing is sampled and nothing is read back while the clock runs, so a device never waits for
the program.
"""

import time
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.model import GPT
from kvlab.model.generate import Decoder, EagerDecoder, make_decoder, prefill

PROMPT_SEED = 0

PREPARATION_NOTE = "compilation, warm-ups, capture and first replay of the step, in no other time"


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
            return [a.elapsed_time(b) / 1000.0 for a, b in pairwise(self._events)]
        return [second - first for first, second in pairwise(self._times)]


def time_preparation(model: GPT, cache: KVCache) -> tuple[Decoder, float]:
    """Return the step of `make_decoder`, and the seconds that it took, from an idle device.

    On CPU an eager step needs no preparation, and the seconds are 0.
    """
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(model.device)
    start = time.perf_counter()
    step = make_decoder(model, cache)
    if is_cuda:
        torch.cuda.synchronize(model.device)
    is_free = not is_cuda and isinstance(step, EagerDecoder)
    return step, 0.0 if is_free else time.perf_counter() - start


@torch.inference_mode()
def time_uncached(model: GPT, length: int) -> float:
    """Return the seconds of an uncached step of one sequence: a pass over ``length`` tokens."""
    tokens = _draw_tokens(model, 1, length)
    if model.device.type == "cuda":  # see `DecodeRun.time`
        prefill(model, tokens, None)
    clock = DeviceClock(model.device)
    clock.mark()
    prefill(model, tokens, None).argmax(-1)
    clock.mark()
    return clock.intervals()[0]


def _draw_tokens(model: GPT, batch_size: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    tokens = torch.randint(model.config.vocab_size, (batch_size, length), generator=generator)
    return tokens.to(model.device)


class DecodeRun:
    """Prefill and decode until a cache is full, as `kvlab generate` does, any number of times.

    The decode step is prepared once, at the first use. With `ServingConfig.compile` it is compiled,
    and on CUDA its graph is warmed up, captured and replayed. No time of a run contains that.

    Args:
        cache: its batch size and length define the run.
        new_tokens: decode steps. The prompt is the rest of the cache's length.

    Attributes:
        preparation: seconds that preparing the step took; 0 until then, and of an eager
            step on CPU.
        read_slots: slots of a sequence that a step reads, those of all layers together and the
            mean over the steps. None until it is prepared, and where they are not counted.
        used_slots: how many of them hold tokens.
    """

    def __init__(self, model: GPT, cache: KVCache, new_tokens: int):
        self.model, self.cache, self.new_tokens, self.preparation = model, cache, new_tokens, 0.0
        self._prompt = _draw_tokens(model, cache.batch_size, cache.max_length - new_tokens)
        self._step: Decoder | None = None
        self.read_slots: float | None = None
        self.used_slots: float | None = None

    @torch.inference_mode()
    def time(self) -> dict[str, list[float]]:
        """Return the seconds of a run: ``first``, of its prefill, and ``steps``, of each token."""
        step = self._step
        if step is None:
            self.cache.reset()
            step, self.preparation = time_preparation(self.model, self.cache)
            self._step = step
            held = range(self._prompt.shape[1], self.cache.max_length)
            self.read_slots = _mean(map(step.count_read_slots, held))
            self.used_slots = _mean(self.cache.count_read_slots(tokens + 1) for tokens in held)
        if self.model.device.type == "cuda":
            # a capture gives the allocator's free memory back: the timed pass must find some
            self._prefill()
        clock = DeviceClock(self.model.device)
        clock.mark()
        token = self._prefill()
        clock.mark()
        for _ in range(self.new_tokens):
            token = step(token).argmax(-1)
            clock.mark()
        first, *steps = clock.intervals()
        return {"first": [first], "steps": steps}

    def _prefill(self) -> Tensor:
        self.cache.reset()
        return prefill(self.model, self._prompt, self.cache).argmax(-1)


def _mean(counts: Iterable[int | None]) -> float | None:
    """Return the mean, or None where nothing is counted."""
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if known else None
