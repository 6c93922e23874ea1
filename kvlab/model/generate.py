"""Choosing the next token from logits (B, V), on their own device, without synchronising."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.model.gpt import GPT
from kvlab.spec import ServingConfig


@dataclass(frozen=True)
class Sampling:
    """How to choose. ``temperature`` 0 is greedy; ``top_k`` and ``top_p`` (nucleus, arXiv
    1904.09751) cut the distribution first, in this order.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature} is below 0; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} is below 1; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} is not above 0 and at most 1")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One token a row: logits (B, V) -> (B,) of int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = _keep_nucleus(logits, sampling.top_p)
    # the largest of p / Exp(1) draws from p; unlike multinomial it does not look at the sum
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / noise).argmax(-1)


def _keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest tokens whose probabilities reach ``top_p``, at least one."""
    ordered, index = logits.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)


# One decode step, made fast: a captured CUDA graph where there is a CUDA device.
#
# At batch 1 a decode step of a small model is bound by launching its kernels, not by memory or
# arithmetic. A graph launches them all at once; it needs static shapes and addresses, which the
# cache's static step gives: positions live on the device, and no memory is allocated.


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


# Prefill, one decode step, and generate: three plain functions over a model and a cache.
#
# B rows, C prompt tokens, V vocab_size.


STOP_CHECK_INTERVAL = 16
"""Steps between looks at whether all rows have ended: each look waits for the device."""


def prefill(
    model: GPT, tokens: Tensor, cache: KVCache | None, lengths: Sequence[int] | None = None
) -> Tensor:
    """Runs prompts (B, C), padded at the end to C, into an empty cache, or without one.

    Returns the logits (B, V) of each row's last real token; the last layer's MLP and the head
    run on those alone.
    """
    wanted = last_token_indices(tokens, lengths)
    in_cache = None if cache is None else lengths
    return model.head(model.hidden(tokens, cache, in_cache, wanted=wanted))


def last_token_indices(tokens: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
    """(B,): the last token of each row of ``tokens`` (B, C), or the last of its ``lengths``
    real ones, counted over all rows."""
    rows, count = tokens.shape
    ends = count if lengths is None else torch.as_tensor(lengths, device=tokens.device)
    return torch.arange(rows, device=tokens.device) * count + ends - 1


def decode_step(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Runs one token a row, (B,), through the cache -> the next one's logits (B, V)."""
    return model.head(model.hidden(tokens[:, None], cache)[:, -1])


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    serving: ServingConfig | None = None,
    cached: bool = True,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """Continues each prompt by up to ``new_tokens`` tokens.

    Args:
        prompts: rows of token ids, of any lengths above 0.
        sampling: default greedy.
        stop: a row ends with the first of these; it is the row's last token.
        seed: of the draws; the same seed, prompts and device give the same tokens.
        serving: how the cache is stored and tied.
        cached: without a cache every step runs the whole text again: the slow baseline.
        on_tokens: called after each step with one new token a row (rows that have ended go on
            unseen, with whatever comes); makes every step wait for the device.

    Returns:
        The new tokens of each row, the prompt left out.

    Raises:
        ValueError: a prompt is empty or holds an id that is no token, or text and new tokens
            exceed learned positions. Nothing has been computed then.
        CacheError: as `KVCache.step`.
    """
    _check_request(model, prompts, new_tokens)
    sampling = sampling or Sampling()
    generator = torch.Generator(model.device).manual_seed(seed)
    lengths = [len(prompt) for prompt in prompts]
    step = (
        _cached_logits(model, prompts, new_tokens, serving)
        if cached
        else _uncached_logits(model, prompts)
    )
    logits, chosen = step(None), []
    ends = torch.tensor(sorted(stop), device=model.device)
    ended = torch.zeros(len(lengths), dtype=torch.bool, device=model.device)
    for index in range(new_tokens):
        tokens = sample(logits, sampling, generator)
        chosen.append(tokens)
        if on_tokens is not None:
            on_tokens(tokens.tolist())
        if stop:
            ended |= torch.isin(tokens, ends)
            if (on_tokens or index % STOP_CHECK_INTERVAL == STOP_CHECK_INTERVAL - 1) and bool(
                ended.all()
            ):
                break
        if index + 1 < new_tokens:
            logits = step(tokens)
    if not chosen:
        return [[] for _ in prompts]
    return [_cut_after_stop(row, stop) for row in torch.stack(chosen, 1).tolist()]


def _check_request(model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty; give each row at least one token")
    if new_tokens < 0:
        raise ValueError(f"new_tokens = {new_tokens} is below 0; use 1 or more")
    config = model.config
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < config.vocab_size:
            text = f"token id = {token} is not in the vocabulary of {config.vocab_size}"
            raise ValueError(f"{text}; use 0 to {config.vocab_size - 1}")
    fed = max(map(len, prompts)) + max(0, new_tokens - 1)  # the last token is never fed
    if config.position_scheme.has_embedding and fed > config.block_size:
        text = f"{fed} tokens exceed block_size = {config.block_size}, the end of the learned"
        raise ValueError(f"{text} positions; shorten the text, or ask for fewer new tokens")


def _cut_after_stop(row: list[int], stop: Collection[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
    return row[:end]


NextLogits = Callable[[Tensor | None], Tensor]
"""Takes the tokens just chosen (None at first) and gives the next logits (B, V)."""


def _pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, device=device)


def _cached_logits(
    model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int, serving: ServingConfig | None
) -> NextLogits:
    lengths = [len(prompt) for prompt in prompts]
    cache = model.new_cache(len(prompts), max(lengths) + new_tokens, serving)
    uneven = lengths if len(set(lengths)) > 1 else None
    first = prefill(model, _pad_right(prompts, model.device), cache, uneven)
    decoder = make_decoder(model, cache)
    return lambda tokens: first if tokens is None else decoder(tokens)


def _uncached_logits(model: GPT, prompts: Sequence[Sequence[int]]) -> NextLogits:
    rows = [list(prompt) for prompt in prompts]

    def step(tokens: Tensor | None) -> Tensor:
        if tokens is not None:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.append(token)
        return prefill(model, _pad_right(rows, model.device), None, [len(row) for row in rows])

    return step
