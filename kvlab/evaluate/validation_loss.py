"""Validation loss by window and by position, one-shot and through the serving cache.

Shapes: B rows, T tokens of a window.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data import iter_validation_batches
from kvlab.evaluate.forward_passes import OnCount, batch_rows, hidden_states
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec import ServingConfig

Tokens = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

POSITION_PARTS = 8


def window_losses(
    model: GPT,
    tokens: Tokens,
    count: int,
    serving: ServingConfig | None,
    on_progress: OnCount,
    document_start: int | None = None,
) -> Floats:
    """Return the nats per token of each validation window of ``block_size`` tokens.

    Args:
        tokens: validation token ids, (tokens,).
        count: tokens to score, rounded up to whole windows.
        serving: feed each token alone through this cache. None: one-shot.
        document_start: see `kvlab.evaluate.forward_passes.hidden_states`.

    Raises:
        DataError: there are fewer tokens.
    """
    block_size = model.config.block_size
    batches = _batch_losses(model, tokens, count, block_size, serving, on_progress, document_start)
    return np.concatenate([losses.mean(1).cpu().numpy() for losses in batches])


def position_losses(
    model: GPT,
    tokens: Tokens,
    count: int,
    length: int,
    serving: ServingConfig | None,
    on_progress: OnCount,
) -> Floats:
    """Return the mean nats (length,) of the token that follows each position.

    A mean over positions hides where a window or a trained length ends.

    Args:
        tokens: validation token ids, (tokens,).
        count: tokens to score, rounded up to whole windows of ``length``.
        serving: feed each token alone through this cache. None: one-shot.

    Raises:
        DataError: there are fewer tokens.
    """
    total, windows = np.zeros(length), 0
    for losses in _batch_losses(model, tokens, count, length, serving, on_progress):
        total += losses.sum(0).cpu().numpy()
        windows += len(losses)
    mean: Floats = total / windows
    return mean


@torch.inference_mode()
def _batch_losses(
    model: GPT,
    tokens: Tokens,
    count: int,
    length: int,
    serving: ServingConfig | None,
    on_progress: OnCount,
    document_start: int | None = None,
) -> Iterator[Tensor]:
    """Yield losses (B, T) in float64 of successive validation windows."""
    batches = iter_validation_batches(
        tokens,
        target_tokens=count,
        block_size=length,
        batch_size=batch_rows(model, length, serving),
    )
    for x, y in batches:
        inputs, targets = (torch.from_numpy(part).to(model.device) for part in (x, y))
        states = hidden_states(model, inputs, serving, on_progress, document_start)
        yield token_losses(states, model.lm_head.weight, targets).double()
        on_progress(x.size)


def position_measurements(losses: Floats, block_size: int, suffix: str) -> dict[str, float]:
    """Return means by the names of `kvlab.store.metrics`.

    They are over eight equal parts of the trained length, in order, and over all positions
    beyond it if there are any.
    """
    parts = np.array_split(losses[:block_size], POSITION_PARTS)
    means = {f"loss_part{i + 1}{suffix}": float(p.mean()) for i, p in enumerate(parts) if len(p)}
    beyond = losses[block_size:]
    return means | ({f"loss_beyond{suffix}": float(beyond.mean())} if len(beyond) else {})


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert nats per token to bits per byte of text, which compare across tokenizers."""
    return loss / math.log(2) / bytes_per_token
