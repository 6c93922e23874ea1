"""Validation loss by window and by position, one-shot and through the serving cache.

Shapes: B rows, T tokens of a window.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data.batches import ScoredText
from kvlab.evaluate.forward_passes import OnCount, batch_rows, hidden_states
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec import ServingConfig

Tokens = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

POSITION_PARTS = 8


def target_losses(
    model: GPT,
    text: ScoredText,
    serving: ServingConfig | None,
    on_progress: OnCount,
    document_start: int | None = None,
) -> Floats:
    """Return the nats of each target (windows, block_size).

    Args:
        serving: feed each token alone through this cache. None: one-shot.
        document_start: see `kvlab.evaluate.forward_passes.hidden_states`.
    """
    batches = _batch_losses(model, text, serving, on_progress, document_start)
    return np.concatenate([losses.cpu().numpy() for losses in batches])


def position_losses(
    model: GPT, text: ScoredText, serving: ServingConfig | None, on_progress: OnCount
) -> Floats:
    """Return the mean nats (block_size,) of the token that follows each position.

    A mean over positions hides where a window or a trained length ends.

    Args:
        serving: feed each token alone through this cache. None: one-shot.
    """
    total = np.zeros(text.block_size)
    for losses in _batch_losses(model, text, serving, on_progress):
        total += losses.sum(0).cpu().numpy()
    mean: Floats = total / len(text)
    return mean


@torch.inference_mode()
def _batch_losses(
    model: GPT,
    text: ScoredText,
    serving: ServingConfig | None,
    on_progress: OnCount,
    document_start: int | None = None,
) -> Iterator[Tensor]:
    """Yield losses (B, T) in float64 of successive windows."""
    for x, y in text.iter_batches(batch_rows(model, text.block_size, serving)):
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


def bits_per_byte(losses: Floats, targets: Tokens, token_bytes: npt.NDArray[np.int64]) -> float:
    """Return bits per byte of the scored text, which compare across tokenizers.

    End-of-text tokens cost bits and have no bytes.

    Args:
        losses: nats of each target, any shape.
        targets: their token ids, of the same shape.
        token_bytes: bytes of each token, (vocab_size,).
    """
    return float(losses.sum() / math.log(2) / max(1, token_bytes[targets].sum()))
