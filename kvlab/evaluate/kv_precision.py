"""What keeping K and V in another dtype than the model's costs, in logits and in loss.

The same windows are decoded twice, through the cache that serves and through one that differs
from it in nothing but its dtype; so what a tie costs is in neither difference.

N tokens, E n_embd, V vocab_size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data import iter_validation_batches
from kvlab.evaluate.forward_passes import OnTokens, decode_rows, served_hidden_states
from kvlab.evaluate.validation_loss import Tokens
from kvlab.layout import KVLayout
from kvlab.layout.training_memory import LOSS_CHUNK_TOKENS
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec import ServingConfig


@dataclass(frozen=True)
class PrecisionComparison:
    """Both ways over the same windows.

    Attributes:
        served: mean nats a token of each window, through the cache that serves.
        exact: the same, K and V kept in the model's dtype.
        logit_rms: root of the mean square of the difference of all logits.
        logit_largest: the largest of those differences.
    """

    served: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]
    logit_rms: float
    logit_largest: float

    @property
    def measurements(self) -> dict[str, float]:
        """By the names of `kvlab.store.metrics`."""
        return {
            "kv_dtype_loss_change": float(self.served.mean() - self.exact.mean()),
            "kv_dtype_logit_rms": self.logit_rms,
            "kv_dtype_logit_largest": self.logit_largest,
        }


def stores_other_dtype(model: GPT, serving: ServingConfig) -> bool:
    """Whether the cache keeps K and V in another dtype than the model's."""
    dtype = str(model.dtype).removeprefix("torch.")
    return KVLayout.of(model.config, serving).storage_dtype(dtype) != dtype


@torch.inference_mode()
def compare_kv_precision(
    model: GPT,
    tokens: Tokens,
    wanted: int,
    serving: ServingConfig,
    tick: OnTokens,
    document_start: int | None = None,
) -> PrecisionComparison:
    """Decodes validation windows through both caches.

    Args:
        wanted: validation tokens; the windows are those of `validation_batches`.
        document_start: see `kvlab.evaluate.forward_passes.served_hidden_states`.

    Raises:
        DataError: there are fewer tokens.
    """
    block = model.config.block_size
    plain = serving.model_copy(update={"kv_dtype": "model"})
    batches = iter_validation_batches(
        tokens,
        target_tokens=wanted,
        block_size=block,
        batch_size=decode_rows(model, block, plain),
    )
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    squares, largest, count = 0.0, 0.0, 0
    for x, y in batches:
        inputs, targets = (torch.from_numpy(part).to(model.device) for part in (x, y))
        served, exact = (
            served_hidden_states(model, inputs, how, tick, document_start)
            for how in (serving, plain)
        )
        for hidden, found in zip((served, exact), losses, strict=True):
            found.append(token_losses(hidden, model.lm_head.weight, targets).double().mean(1))
        summed, most = _logit_differences(model, served - exact)
        squares, largest, count = squares + summed, max(largest, most), count + x.size
        tick(2 * x.size)
    rms = (squares / (count * model.config.vocab_size)) ** 0.5
    served_losses, exact_losses = (torch.cat(found).cpu().numpy() for found in losses)
    return PrecisionComparison(served_losses, exact_losses, rms, largest)


def _logit_differences(model: GPT, hidden: Tensor) -> tuple[float, float]:
    """Sum of squares and largest size of the logits of a difference of residual streams: the
    head is linear, so these are the differences of the logits. A chunk at a time."""
    squares, largest = 0.0, 0.0
    size = LOSS_CHUNK_TOKENS.get(hidden.device.type, LOSS_CHUNK_TOKENS["cuda"])
    for part in torch.split(hidden.flatten(0, -2), size):
        logits = model.compute_logits(part).float()
        squares += float(logits.square().sum(dtype=torch.float64))
        largest = max(largest, float(logits.abs().max()))
    return squares, largest
