"""Loss by position in the context: a mean hides where a window or a trained length ends."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data import validation_batches
from kvlab.evaluate.batching import decode_rows, pass_rows
from kvlab.evaluate.loss import Tokens
from kvlab.evaluate.served import Tick, served_hidden
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec.parts import ServingConfig

PARTS = 8


@torch.inference_mode()
def position_losses(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    length: int,
    serving: ServingConfig | None,
    tick: Tick,
) -> npt.NDArray[np.float64]:
    """(length,) mean nats of the token that follows each position, over validation windows.

    Args:
        wanted: validation tokens; whole windows of ``length``, rounded up.
        serving: token by token through this cache; None: one-shot.

    Raises:
        DataError: there are fewer tokens.
    """
    rows = pass_rows(model, length) if serving is None else decode_rows(model, length, serving)
    batches = validation_batches(tokens, tokens_wanted=wanted, block_size=length, batch_size=rows)
    total, count = np.zeros(length), 0
    for x, y in batches:
        inputs, targets = (torch.from_numpy(part).to(model.device) for part in (x, y))
        losses = token_losses(_hidden(model, inputs, serving, tick), model.lm_head.weight, targets)
        total += losses.double().sum(0).cpu().numpy()
        count += len(x)
        tick(x.size)
    mean: npt.NDArray[np.float64] = total / count
    return mean


def _hidden(model: GPT, x: Tensor, serving: ServingConfig | None, tick: Tick) -> Tensor:
    return model.hidden(x) if serving is None else served_hidden(model, x, serving, tick)


def position_measurements(
    losses: npt.NDArray[np.float64], block_size: int, ending: str
) -> dict[str, float]:
    """Means by the names of `kvlab.trial.metrics`: of eight equal parts of the trained length,
    in order, and of all positions beyond it where there are any."""
    parts = np.array_split(losses[:block_size], PARTS)
    found = {f"loss_part{i + 1}{ending}": float(p.mean()) for i, p in enumerate(parts) if len(p)}
    beyond = losses[block_size:]
    return found | ({f"loss_beyond{ending}": float(beyond.mean())} if len(beyond) else {})
