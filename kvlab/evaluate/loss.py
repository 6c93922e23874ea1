"""Validation loss, one-shot and token by token through the serving cache."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data import validation_batches
from kvlab.evaluate.batching import decode_rows, pass_rows
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec.parts import ServingConfig

Tokens = npt.NDArray[np.integer]
Tick = Callable[[int], None]
"""Called with the number of tokens just scored."""


@torch.inference_mode()
def window_losses(model: GPT, tokens: Tokens, wanted: int, tick: Tick) -> npt.NDArray[np.float64]:
    """Mean nats a token of each window of ``block_size`` tokens, in one forward pass.

    Args:
        wanted: validation tokens; the windows are those of `validation_batches`.

    Raises:
        DataError: there are fewer tokens.
    """
    rows = pass_rows(model, model.config.block_size)
    return _over_windows(model, tokens, wanted, rows, lambda x: model.hidden(x), tick)


@torch.inference_mode()
def served_window_losses(
    model: GPT, tokens: Tokens, wanted: int, serving: ServingConfig, tick: Tick
) -> npt.NDArray[np.float64]:
    """The same, decoding: every token is fed alone, and sees the past through the cache."""
    rows = decode_rows(model, model.config.block_size, serving)
    hidden = partial(served_hidden, model, serving=serving, tick=tick)
    return _over_windows(model, tokens, wanted, rows, hidden, tick)


def served_hidden(model: GPT, x: Tensor, serving: ServingConfig, tick: Tick) -> Tensor:
    """The residual stream (B, C, E) of tokens (B, C), each fed alone through a new cache."""
    cache = model.new_cache(len(x), x.shape[1], serving)
    parts = []
    for at in range(x.shape[1]):
        parts.append(model.hidden(x[:, at : at + 1], cache=cache))
        tick(0)
    return torch.cat(parts, 1)


def _over_windows(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    rows: int,
    hidden: Callable[[Tensor], Tensor],
    tick: Tick,
) -> npt.NDArray[np.float64]:
    found = []
    batches = validation_batches(
        tokens, tokens_wanted=wanted, block_size=model.config.block_size, batch_size=rows
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
