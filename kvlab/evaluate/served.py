"""Text through the serving cache, every token fed alone: what a served model sees.

B rows, C tokens, E n_embd.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.evaluate.batching import decode_rows
from kvlab.model import GPT
from kvlab.spec.parts import ServingConfig

Tick = Callable[[int], None]
"""Called with the number of tokens just scored."""

Piece = tuple[int, int, int]
"""A row, and where one of its documents starts and ends there."""


def served_hidden(
    model: GPT, x: Tensor, serving: ServingConfig, tick: Tick, document_start: int | None = None
) -> Tensor:
    """The residual stream (B, C, E) of tokens (B, C), each fed alone through a new cache.

    Args:
        document_start: the token that begins a document; each has a row of the cache to itself,
            as when it is served. None: each row is one.
    """
    if document_start is not None:
        return _by_document(model, x, serving, tick, document_start)
    cache = model.new_cache(len(x), x.shape[1], serving)
    parts = []
    for at in range(x.shape[1]):
        parts.append(model.hidden(x[:, at : at + 1], cache=cache))
        tick(0)
    return torch.cat(parts, 1)


def _by_document(
    model: GPT, x: Tensor, serving: ServingConfig, tick: Tick, document_start: int
) -> Tensor:
    hidden = torch.empty(*x.shape, model.config.n_embd, dtype=model.dtype, device=model.device)
    # the longest first: rows that go together are then of about equal length
    pieces = sorted(_pieces(x, document_start), key=lambda p: p[1] - p[2])
    done = 0
    while done < len(pieces):
        _, start, end = pieces[done]
        some = pieces[done : done + decode_rows(model, end - start, serving)]
        done += len(some)
        _decode_pieces(model, x, some, serving, tick, hidden)
    return hidden


def _pieces(x: Tensor, document_start: int) -> Iterator[Piece]:
    for row, begins in enumerate((x == document_start).tolist()):
        bounds = [0, *(at for at, is_one in enumerate(begins) if is_one and at), len(begins)]
        for start, end in pairwise(bounds):
            yield row, start, end


def _decode_pieces(
    model: GPT, x: Tensor, pieces: list[Piece], serving: ServingConfig, tick: Tick, out: Tensor
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
        found.append(model.hidden(tokens[:, at : at + 1], cache=cache, lengths=real))
        tick(0)
    states = torch.cat(found, 1)
    for at, (row, start, end) in enumerate(pieces):
        out[row, start:end] = states[at, : end - start]
