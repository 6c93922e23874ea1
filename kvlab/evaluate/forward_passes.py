"""Text through the serving cache, every token fed alone: what a served model sees.

B rows, C tokens, E n_embd.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec import ServingConfig

OnTokens = Callable[[int], None]
"""Called with the number of tokens just scored."""

DocumentSpan = tuple[int, int, int]
"""A row, and where one of its documents starts and ends there."""


def served_hidden_states(
    model: GPT, x: Tensor, serving: ServingConfig, tick: OnTokens, document_start: int | None = None
) -> Tensor:
    """The residual stream (B, C, E) of tokens (B, C), each fed alone through a new cache.

    Args:
        document_start: the token that begins a document; each has a row of the cache to itself,
            as when it is served. None: each row is one.
    """
    if document_start is not None:
        return _served_hidden_by_document(model, x, serving, tick, document_start)
    cache = model.new_cache(len(x), x.shape[1], serving)
    parts = []
    for at in range(x.shape[1]):
        parts.append(model.hidden_states(x[:, at : at + 1], cache=cache))
        tick(0)
    return torch.cat(parts, 1)


def _served_hidden_by_document(
    model: GPT, x: Tensor, serving: ServingConfig, tick: OnTokens, document_start: int
) -> Tensor:
    hidden = torch.empty(*x.shape, model.config.n_embd, dtype=model.dtype, device=model.device)
    # the longest first: rows that go together are then of about equal length
    pieces = sorted(_document_spans(x, document_start), key=lambda p: p[1] - p[2])
    done = 0
    while done < len(pieces):
        _, start, end = pieces[done]
        some = pieces[done : done + decode_rows(model, end - start, serving)]
        done += len(some)
        _decode_documents(model, x, some, serving, tick, hidden)
    return hidden


def _document_spans(x: Tensor, document_start: int) -> Iterator[DocumentSpan]:
    for row, begins in enumerate((x == document_start).tolist()):
        bounds = [0, *(at for at, is_one in enumerate(begins) if is_one and at), len(begins)]
        for start, end in pairwise(bounds):
            yield row, start, end


def _decode_documents(
    model: GPT,
    x: Tensor,
    pieces: list[DocumentSpan],
    serving: ServingConfig,
    tick: OnTokens,
    out: Tensor,
) -> None:
    """Fills in ``out`` (B, C, E) where the pieces are; the longest comes first."""
    lengths = torch.tensor([end - start for _, start, end in pieces], device=x.device)
    longest = int(lengths[0])
    tokens = torch.zeros(len(pieces), longest, dtype=x.dtype, device=x.device)
    for at, (row, start, end) in enumerate(pieces):
        tokens[at, : end - start] = x[row, start:end]
    cache = model.new_cache(len(pieces), longest, serving)
    uneven = int(lengths[-1]) < longest
    found = []
    for at in range(longest):
        real = (lengths - at).clamp(0, 1) if uneven else None
        found.append(model.hidden_states(tokens[:, at : at + 1], cache=cache, lengths=real))
        tick(0)
    states = torch.cat(found, 1)
    for at, (row, start, end) in enumerate(pieces):
        out[row, start:end] = states[at, : end - start]


# How many rows are scored at once: enough for speed, few enough for memory.


PASS_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Tokens of one forward pass. More than this was no faster on CPU."""

DECODE_ROWS = {"cpu": 64, "cuda": 512}
"""Rows decoded side by side. Measured on one core for the quickstart's shape: 5,500 tokens/s
with 16 rows, 6,500 with 64, 5,100 with 128."""

CACHE_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}
"""The most that the caches of those rows may take."""


def pass_rows(model: GPT, length: int) -> int:
    """Rows of ``length`` tokens in one forward pass."""
    return max(1, _for_device(PASS_TOKENS, model) // length)


def decode_rows(model: GPT, length: int, serving: ServingConfig | None) -> int:
    """Rows of up to ``length`` tokens whose caches are filled side by side."""
    dtype = str(model.dtype).removeprefix("torch.")
    row = KVLayout.of(model.config, serving).stored_bytes(1, length, dtype)
    return max(1, min(_for_device(DECODE_ROWS, model), _for_device(CACHE_BYTES, model) // row))


def _for_device(table: dict[str, int], model: GPT) -> int:
    return table.get(model.device.type, table["cuda"])
