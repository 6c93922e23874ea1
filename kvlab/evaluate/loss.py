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
from kvlab.evaluate.served import Tick, served_hidden
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec.parts import ServingConfig

Tokens = npt.NDArray[np.integer]


@torch.inference_mode()
def window_losses(
    model: GPT, tokens: Tokens, wanted: int, tick: Tick, document_start: int | None = None
) -> npt.NDArray[np.float64]:
    """Mean nats a token of each window of ``block_size`` tokens, in one forward pass.

    Args:
        wanted: validation tokens; the windows are those of `validation_batches`.
        document_start: see `GPT.hidden`; None: documents see those before them.

    Raises:
        DataError: there are fewer tokens.
    """
    rows = pass_rows(model, model.config.block_size)
    hidden = partial(model.hidden, document_start=document_start)
    return _over_windows(model, tokens, wanted, rows, hidden, tick)


@torch.inference_mode()
def served_window_losses(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    serving: ServingConfig,
    tick: Tick,
    document_start: int | None = None,
) -> npt.NDArray[np.float64]:
    """The same, decoding: every token is fed alone, and sees the past through the cache."""
    rows = decode_rows(model, model.config.block_size, serving)
    hidden = partial(
        served_hidden, model, serving=serving, tick=tick, document_start=document_start
    )
    return _over_windows(model, tokens, wanted, rows, hidden, tick)


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
