"""Prefill, one decode step, and generate: three plain functions over a model and a cache.

B rows, C prompt tokens, V vocab_size.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.model.decode import make_decoder
from kvlab.model.gpt import GPT
from kvlab.model.sampling import Sampling, sample
from kvlab.spec.parts import ServingConfig

CHECK_EVERY = 16
"""Steps between looks at whether all rows have ended: each look waits for the device."""


def prefill(
    model: GPT, tokens: Tensor, cache: KVCache | None, lengths: Sequence[int] | None = None
) -> Tensor:
    """Runs prompts (B, C), padded at the end to C, into an empty cache, or without one.

    Returns the logits (B, V) of each row's last real token; the last layer's MLP and the head
    run on those alone.
    """
    wanted = last_tokens(tokens, lengths)
    in_cache = None if cache is None else lengths
    return model.head(model.hidden(tokens, cache, in_cache, wanted=wanted))


def last_tokens(tokens: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
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
    _check(model, prompts, new_tokens)
    sampling = sampling or Sampling()
    generator = torch.Generator(model.device).manual_seed(seed)
    lengths = [len(prompt) for prompt in prompts]
    step = _cached(model, prompts, new_tokens, serving) if cached else _uncached(model, prompts)
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
            if (on_tokens or index % CHECK_EVERY == CHECK_EVERY - 1) and bool(ended.all()):
                break
        if index + 1 < new_tokens:
            logits = step(tokens)
    if not chosen:
        return [[] for _ in prompts]
    return [_until(row, stop) for row in torch.stack(chosen, 1).tolist()]


def _check(model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
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
    if config.position == "learned" and fed > config.block_size:
        text = f"{fed} tokens exceed block_size = {config.block_size}, the end of the learned"
        raise ValueError(f"{text} positions; shorten the text, or ask for fewer new tokens")


def _until(row: list[int], stop: Collection[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
    return row[:end]


Step = Callable[[Tensor | None], Tensor]
"""Takes the tokens just chosen (None at first) and gives the next logits (B, V)."""


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, device=device)


def _cached(
    model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int, serving: ServingConfig | None
) -> Step:
    lengths = [len(prompt) for prompt in prompts]
    cache = model.new_cache(len(prompts), max(lengths) + new_tokens, serving)
    uneven = lengths if len(set(lengths)) > 1 else None
    first = prefill(model, _padded(prompts, model.device), cache, uneven)
    decoder = make_decoder(model, cache)
    return lambda tokens: first if tokens is None else decoder(tokens)


def _uncached(model: GPT, prompts: Sequence[Sequence[int]]) -> Step:
    rows = [list(prompt) for prompt in prompts]

    def step(tokens: Tensor | None) -> Tensor:
        if tokens is not None:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.append(token)
        return prefill(model, _padded(rows, model.device), None, [len(row) for row in rows])

    return step
