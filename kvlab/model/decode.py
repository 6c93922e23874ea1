"""One decode step, made fast: a captured CUDA graph where there is a CUDA device.

At batch 1 a decode step of a small model is bound by launching its kernels, not by memory or
arithmetic. A graph launches them all at once; it needs static shapes and addresses, which the
cache's static step gives: positions live on the device, and no memory is allocated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.model.gpt import GPT

Decoder = Callable[[Tensor], Tensor]
"""Tokens (B,) -> logits (B, V) of the next ones; valid until the next call."""


def make_decoder(model: GPT, cache: KVCache) -> Decoder:
    """A decoder for the state that ``cache`` is in, after its prompts are in it."""
    if model.device.type == "cuda":
        return GraphDecoder(model, cache)
    return EagerDecoder(model, cache)


class EagerDecoder:
    """Runs the model's own forward. On CPU this reads only the slots in use, unmasked."""

    def __init__(self, model: GPT, cache: KVCache):
        self._model, self._cache = model, cache

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._model.head(self._model.hidden(tokens[:, None], self._cache)[:, -1])


class GraphDecoder:
    """Captures one static step as a CUDA graph and replays it for every token."""

    WARM_UPS = 3

    def __init__(self, model: GPT, cache: KVCache):
        self._cache = cache
        self._step = StaticDecoder(model, cache)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # as torch declares it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # lazy set-up must not happen inside the capture
            for _ in range(self.WARM_UPS):
                self._step.compute()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph):
            self._logits = self._step.compute()

    def __call__(self, tokens: Tensor) -> Tensor:
        self._step.prepare(tokens)
        self._graph.replay()
        self._step.advance()
        return self._logits


class StaticDecoder:
    """A step of static shapes and addresses: what the graph captures. Runs anywhere.

    `compute` reads tokens and positions from fixed tensors, so that it may run any number of
    times without moving on: it writes the same slots again.
    """

    def __init__(self, model: GPT, cache: KVCache):
        self._model, self._cache = model, cache
        self._tokens = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=cache.device)
        self._step = cache.static_step()

    def __call__(self, tokens: Tensor) -> Tensor:
        self.prepare(tokens)
        logits = self.compute()
        self.advance()
        return logits

    def prepare(self, tokens: Tensor) -> None:
        self._step.check_room()
        self._tokens.copy_(tokens[:, None])

    def compute(self) -> Tensor:
        return self._model.head(self._model.run(self._tokens, self._step)[:, -1])

    def advance(self) -> None:
        self._step.advance()
