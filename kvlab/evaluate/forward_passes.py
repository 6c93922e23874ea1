"""Forward passes of evaluation, one-shot and token by token through the serving cache.

Shapes: B rows of a batch, R rows, T tokens, P positions, E n_embd.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.model.generate import make_decoder
from kvlab.spec import ServingConfig

Arrays = dict[str, npt.NDArray[Any]]

Batch = TypeVar("Batch")


class Part:
    """One part of an evaluation. This one reports no progress and keeps no results."""

    def advance(self, count: int, place: str = "") -> None:
        """Add tokens or continuations to those that are done; possibly 0, at a place between."""

    def keep(
        self, compute: Callable[[Batch], Arrays], batches: Iterable[Batch]
    ) -> Iterator[Arrays]:
        """Yield ``compute(batch)`` of each, which depends on the batch alone."""
        return map(compute, batches)


SILENT = Part()

PASS_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Tokens of one forward pass."""

DECODE_ROWS = {"cpu": 64, "cuda": 512}
"""The most rows decoded side by side."""

CACHE_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}
"""The most bytes that the caches of those rows may take."""


def pass_rows(model: GPT, length: int) -> int:
    """Return the rows of ``length`` tokens in one forward pass."""
    return max(1, PASS_TOKENS[model.device.type] // length)


def decode_rows(model: GPT, length: int, serving: ServingConfig | None) -> int:
    """Return the rows of up to ``length`` tokens that are decoded side by side."""
    row_bytes = KVLayout.of(model.config, serving).stored_bytes(1, length, model.dtype_name)
    fitting = CACHE_BYTES[model.device.type] // row_bytes
    return max(1, min(DECODE_ROWS[model.device.type], fitting))


def batch_rows(model: GPT, length: int, serving: ServingConfig | None) -> int:
    """Return the rows of one call of `hidden_states`."""
    return pass_rows(model, length) if serving is None else decode_rows(model, length, serving)


def hidden_states(
    model: GPT,
    x: Tensor,
    serving: ServingConfig | None,
    part: Part = SILENT,
    document_start: int | None = None,
) -> Tensor:
    """Return the residual stream (B, T, E) of tokens (B, T).

    Args:
        serving: feed each token alone through a new cache of this kind. None: one-shot.
        part: advanced by 0 after every decoded token, with its place.
        document_start: the token that begins a document. Documents do not attend to each other;
            when served, each has a row of the cache to itself. None: each row is one document.
    """
    if serving is None:
        return model.hidden_states(x, document_start=document_start)
    if document_start is not None:
        return _decode_by_document(model, x, serving, part, document_start)
    return _decode_rows(model, x, serving, part, x.shape[1])


def _decode_rows(
    model: GPT, x: Tensor, serving: ServingConfig, part: Part, max_length: int
) -> Tensor:
    """Return the residual stream (B, T, E) of tokens (B, T), by the step that generates text.

    Nothing in the loop waits for the device: on CUDA the steps of one captured graph follow each
    other.

    Args:
        max_length: of the cache, at least T.
    """
    cache = model.new_cache(len(x), max_length, serving)
    step = make_decoder(model, cache, head=False)
    states = torch.empty(*x.shape, model.config.n_embd, dtype=model.dtype, device=model.device)
    for number, tokens in enumerate(x.unbind(1)):
        states[:, number] = step(tokens)
        part.advance(0, f"token {number + 1:,} of {x.shape[1]:,}")
    return states


def compute_at(
    model: GPT,
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    serving: ServingConfig | None,
    part: Part,
    compute: Callable[[slice, Tensor], Arrays],
) -> Arrays:
    """Return what ``compute`` returns of all rows (R, T), each array joined along its rows.

    Args:
        serving: see `hidden_states`.
        part: advanced by the tokens that are newly read.
        compute: takes some rows and their residual stream (B, P, E) at ``positions`` (P,).
    """
    size = batch_rows(model, rows.shape[1], serving)
    selected = torch.from_numpy(positions).to(model.device)

    def run(some: slice) -> Arrays:
        tokens = torch.from_numpy(rows[some]).to(model.device)
        states = hidden_states(model, tokens, serving, part)[:, selected]
        part.advance(tokens.numel())
        return compute(some, states)

    batches = [slice(start, start + size) for start in range(0, len(rows), size)]
    return join_arrays(part.keep(run, batches))


def join_arrays(parts: Iterable[Arrays]) -> Arrays:
    """Return each array of all parts, along the first axis."""
    done = list(parts)
    return {name: np.concatenate([part[name] for part in done]) for name in done[0]}


def _decode_by_document(
    model: GPT, x: Tensor, serving: ServingConfig, part: Part, document_start: int
) -> Tensor:
    """Return the residual stream (B, T, E) of tokens (B, T), decoded document by document.

    Documents whose end has come go on with padding, which no other row sees. So all rows of a batch
    have one length, and nothing has to be asked of the device.
    """
    states = torch.empty(*x.shape, model.config.n_embd, dtype=model.dtype, device=model.device)
    # sorted by length, the longest first, so that batches have little padding
    spans = sorted(document_spans(x, document_start), key=lambda span: span[1] - span[2])
    done = 0
    while done < len(spans):
        _, start, end = spans[done]
        longest = max_length = end - start
        if serving.compile:  # each size is compiled anew, so that all have that of the rows
            rows, max_length = x.shape
        else:
            rows = min(decode_rows(model, longest, serving), len(spans) - done)
        batch = spans[done : done + rows]
        done += len(batch)
        tokens = torch.zeros(rows, longest, dtype=x.dtype, device=x.device)
        for i, (row, start, end) in enumerate(batch):
            tokens[i, : end - start] = x[row, start:end]
        decoded = _decode_rows(model, tokens, serving, part, max_length)
        for i, (row, start, end) in enumerate(batch):
            states[row, start:end] = decoded[i, : end - start]
    return states


def document_spans(x: Tensor, document_start: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of the documents of x (B, T), which ``document_start`` begins.

    Without it each row is one document.
    """
    if document_start is None:
        yield from ((row, 0, x.shape[1]) for row in range(len(x)))
        return
    for row, is_start in enumerate((x == document_start).tolist()):
        inner = (position for position, starts in enumerate(is_start) if starts and position)
        for start, end in pairwise([0, *inner, len(is_start)]):
            yield row, start, end
