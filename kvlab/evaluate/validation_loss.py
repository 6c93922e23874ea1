"""Validation loss, one-shot and token by token through the serving cache."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data import iter_validation_batches
from kvlab.evaluate.forward_passes import OnTokens, decode_rows, pass_rows, served_hidden_states
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec import ServingConfig

Tokens = npt.NDArray[np.integer]


@torch.inference_mode()
def one_shot_window_losses(
    model: GPT, tokens: Tokens, wanted: int, tick: OnTokens, document_start: int | None = None
) -> npt.NDArray[np.float64]:
    """Mean nats a token of each window of ``block_size`` tokens, in one forward pass.

    Args:
        wanted: validation tokens; the windows are those of `validation_batches`.
        document_start: see `GPT.hidden_states`; None: documents see those before them.

    Raises:
        DataError: there are fewer tokens.
    """
    rows = pass_rows(model, model.config.block_size)
    hidden = partial(model.hidden_states, document_start=document_start)
    return _window_losses(model, tokens, wanted, rows, hidden, tick)


@torch.inference_mode()
def served_window_losses(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    serving: ServingConfig,
    tick: OnTokens,
    document_start: int | None = None,
) -> npt.NDArray[np.float64]:
    """The same, decoding: every token is fed alone, and sees the past through the cache."""
    rows = decode_rows(model, model.config.block_size, serving)
    hidden = partial(
        served_hidden_states, model, serving=serving, tick=tick, document_start=document_start
    )
    return _window_losses(model, tokens, wanted, rows, hidden, tick)


def _window_losses(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    rows: int,
    hidden: Callable[[Tensor], Tensor],
    tick: OnTokens,
) -> npt.NDArray[np.float64]:
    found = []
    batches = iter_validation_batches(
        tokens, target_tokens=wanted, block_size=model.config.block_size, batch_size=rows
    )
    for x, y in batches:
        inputs, targets = (torch.from_numpy(part).to(model.device) for part in (x, y))
        losses = token_losses(hidden(inputs), model.lm_head.weight, targets)
        found.append(losses.double().mean(1).cpu().numpy())
        tick(x.size)
    return np.concatenate(found)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Nats a token -> bits a byte of text: comparable across tokenizers."""
    return loss / math.log(2) / bytes_per_token


# Loss by position in the context: a mean hides where a window or a trained length ends.


POSITION_PARTS = 8


@torch.inference_mode()
def position_losses(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    length: int,
    serving: ServingConfig | None,
    tick: OnTokens,
) -> npt.NDArray[np.float64]:
    """(length,) mean nats of the token that follows each position, over validation windows.

    Args:
        wanted: validation tokens; whole windows of ``length``, rounded up.
        serving: token by token through this cache; None: one-shot.

    Raises:
        DataError: there are fewer tokens.
    """
    rows = pass_rows(model, length) if serving is None else decode_rows(model, length, serving)
    batches = iter_validation_batches(
        tokens, target_tokens=wanted, block_size=length, batch_size=rows
    )
    total, count = np.zeros(length), 0
    for x, y in batches:
        inputs, targets = (torch.from_numpy(part).to(model.device) for part in (x, y))
        losses = token_losses(
            _position_hidden_states(model, inputs, serving, tick), model.lm_head.weight, targets
        )
        total += losses.double().sum(0).cpu().numpy()
        count += len(x)
        tick(x.size)
    mean: npt.NDArray[np.float64] = total / count
    return mean


def _position_hidden_states(
    model: GPT, x: Tensor, serving: ServingConfig | None, tick: OnTokens
) -> Tensor:
    return (
        model.hidden_states(x) if serving is None else served_hidden_states(model, x, serving, tick)
    )


def position_measurements(
    losses: npt.NDArray[np.float64], block_size: int, ending: str
) -> dict[str, float]:
    """Means by the names of `kvlab.store.metrics`: of eight equal parts of the trained length,
    in order, and of all positions beyond it where there are any."""
    parts = np.array_split(losses[:block_size], POSITION_PARTS)
    found = {f"loss_part{i + 1}{ending}": float(p.mean()) for i, p in enumerate(parts) if len(p)}
    beyond = losses[block_size:]
    return found | ({f"loss_beyond{ending}": float(beyond.mean())} if len(beyond) else {})
