"""What storing K and V in another dtype than the model's costs, in logits and in loss.

The same windows are decoded twice: through the serving cache, and through one that differs from
it only in dtype. The cost of tying is therefore in neither difference.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data import iter_validation_batches
from kvlab.evaluate.forward_passes import OnCount, decode_rows, hidden_states
from kvlab.evaluate.validation_loss import Tokens
from kvlab.layout import KVLayout
from kvlab.layout.training_memory import LOSS_CHUNK_TOKENS
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec import ServingConfig


@dataclass(frozen=True)
class PrecisionComparison:
    """The serving cache beside one in the model's dtype, over the same windows.

    Attributes:
        served: nats per token of each window through the serving cache.
        exact: the same with K and V in the model's dtype.
        logit_rms: root mean square of the differences of all logits.
        logit_largest: the largest of those differences.
    """

    served: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]
    logit_rms: float
    logit_largest: float

    @property
    def measurements(self) -> dict[str, float]:
        """The costs by the names of `kvlab.store.metrics`."""
        return {
            "kv_dtype_loss_change": float(self.served.mean() - self.exact.mean()),
            "kv_dtype_logit_rms": self.logit_rms,
            "kv_dtype_logit_largest": self.logit_largest,
        }


def stores_other_dtype(model: GPT, serving: ServingConfig) -> bool:
    """Return whether the cache stores K and V in another dtype than the model's."""
    storage_dtype = KVLayout.of(model.config, serving).storage_dtype(model.dtype_name)
    return storage_dtype != model.dtype_name


@torch.inference_mode()
def compare_kv_precision(
    model: GPT,
    tokens: Tokens,
    count: int,
    serving: ServingConfig,
    on_progress: OnCount,
    document_start: int | None = None,
) -> PrecisionComparison:
    """Decode validation windows through both caches.

    Args:
        tokens: validation token ids, (tokens,).
        count: tokens to score, rounded up to whole windows of ``block_size``.
        document_start: see `kvlab.evaluate.forward_passes.hidden_states`.

    Raises:
        DataError: there are fewer tokens.
    """
    block_size = model.config.block_size
    exact_serving = serving.model_copy(update={"kv_dtype": "model"})
    batches = iter_validation_batches(
        tokens,
        target_tokens=count,
        block_size=block_size,
        batch_size=decode_rows(model, block_size, exact_serving),
    )
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    squares, largest, scored = 0.0, 0.0, 0
    for x, y in batches:
        inputs, targets = (torch.from_numpy(part).to(model.device) for part in (x, y))
        served, exact = (
            hidden_states(model, inputs, cache, on_progress, document_start)
            for cache in (serving, exact_serving)
        )
        for states, means in zip((served, exact), losses, strict=True):
            means.append(token_losses(states, model.lm_head.weight, targets).double().mean(1))
        batch_squares, batch_largest = _logit_differences(model, served - exact)
        squares += batch_squares
        largest, scored = max(largest, batch_largest), scored + x.size
        on_progress(2 * x.size)
    rms = (squares / (scored * model.config.vocab_size)) ** 0.5
    served_losses, exact_losses = (torch.cat(means).cpu().numpy() for means in losses)
    return PrecisionComparison(served_losses, exact_losses, rms, largest)


def _logit_differences(model: GPT, difference: Tensor) -> tuple[float, float]:
    """Return the sum of squares and the largest absolute value of logit differences.

    The head is linear, so the logits of a ``difference`` of residual streams are the differences
    of their logits. They are computed a chunk at a time.
    """
    squares, largest = 0.0, 0.0
    size = LOSS_CHUNK_TOKENS.get(difference.device.type, LOSS_CHUNK_TOKENS["cuda"])
    for chunk in torch.split(difference.flatten(0, -2), size):
        logits = model.compute_logits(chunk).float()
        squares += float(logits.square().sum(dtype=torch.float64))
        largest = max(largest, float(logits.abs().max()))
    return squares, largest
