"""Next-token loss from the residual stream, without ever holding the logits of all tokens.

Logits exist for one chunk of tokens at a time. Gradients are computed in the forward pass, chunk
by chunk, since the gradient of a sum of losses with respect to the logits needs nothing from
later layers. So nothing is computed twice, and nothing of size (N, V) is saved. Liger-Kernel
(arXiv 2410.10989) does the same. On CUDA a kernel in Triton overwrites a chunk's logits by their
gradient; elsewhere there are float32 probabilities beside them.

Shapes: N tokens, E n_embd, V vocab_size.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.layout.training_memory import LOSS_CHUNK_TOKENS
from kvlab.model.kernels.linear import matmul_transposed
from kvlab.model.kernels.triton_cross_entropy import cross_entropy_in_place
from kvlab.model.kernels.triton_runtime import are_kernels_usable


def summed_loss(
    hidden_states: Tensor, head_weight: Tensor, targets: Tensor, *, compile: bool = False
) -> Tensor:
    """Return the sum over tokens of -log p(target), in nats; differentiable once.

    Under autocast the matrix products have its dtype; softmax and sums have float32.

    Args:
        hidden_states: (..., E), the residual stream after the final norm.
        head_weight: (V, E).
        targets: (...) of int64.
        compile: fuse the passes over the logits with `torch.compile`.
    """
    if not torch.is_grad_enabled():
        return token_losses(hidden_states, head_weight, targets).sum()
    rows, targets = hidden_states.flatten(0, -2), targets.flatten()
    loss: Tensor = _SummedLossFunction.apply(  # type: ignore[no-untyped-call]
        rows, head_weight, targets, compile
    )
    return loss


def token_losses(hidden_states: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target) of every token (...), in nats. Not differentiable.

    Args:
        hidden_states, head_weight, targets: see `summed_loss`.
    """
    chunks = iter_logits(hidden_states, head_weight, targets)
    losses = [_losses_and_probabilities(logits, own)[0] for logits, own in chunks]
    return torch.cat(losses).view(targets.shape)


def token_scores(
    hidden_states: Tensor, head_weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and whether its target is the likeliest token.

    Not differentiable.

    Args:
        hidden_states, head_weight, targets: see `summed_loss`.

    Returns:
        -log p(target) (...), in nats, and (...) of bool: whether the target has the largest
        logit, the first of equal ones counting.
    """
    losses, hits = [], []
    for logits, chunk_targets in iter_logits(hidden_states, head_weight, targets):
        # argmax takes longer than amax: ask for it only where the target has the maximum
        hit = logits.gather(1, chunk_targets[:, None])[:, 0] == logits.amax(1)
        hit[hit.clone()] = logits[hit].argmax(1) == chunk_targets[hit]
        hits.append(hit)
        losses.append(_losses_and_probabilities(logits, chunk_targets)[0])
    return torch.cat(losses).view(targets.shape), torch.cat(hits).view(targets.shape)


def iter_logits(
    hidden_states: Tensor, head_weight: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of one chunk of tokens after another, which may be overwritten, and their
    targets."""
    dtype = _matmul_dtype(hidden_states)
    weight = head_weight.detach().to(dtype)
    for rows, chunk_targets in _iter_chunks(hidden_states.flatten(0, -2), targets.flatten()):
        with torch.no_grad(), _disable_autocast(hidden_states):
            logits = matmul_transposed(rows.to(dtype), weight)
        yield logits, chunk_targets


class _SummedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, targets: Tensor, compile: bool
    ) -> Tensor:
        dtype = _matmul_dtype(hidden_states)
        loss_and_gradient = _compile_loss_and_gradient() if compile else _loss_and_gradient
        has_kernel = are_kernels_usable(hidden_states.device)
        hidden_gradient = torch.empty_like(hidden_states)
        weight_gradient = torch.zeros_like(weight)
        total = torch.zeros((), dtype=_softmax_dtype(dtype), device=hidden_states.device)
        with _disable_autocast(hidden_states):
            cast_weight = weight.to(dtype)
            chunks = _iter_chunks(hidden_states, targets, hidden_gradient)
            for chunk, chunk_targets, chunk_gradient in chunks:
                rows = chunk.to(dtype)
                logits = matmul_transposed(rows, cast_weight)
                if has_kernel:  # which holds nothing beside the logits
                    loss, gradient = cross_entropy_in_place(logits, chunk_targets).sum(), logits
                else:
                    loss, gradient = loss_and_gradient(logits, chunk_targets)
                del logits
                total += loss
                chunk_gradient.copy_(matmul_transposed(gradient, cast_weight.T))
                _add_product(weight_gradient, gradient.T, rows)
                del gradient  # or it would be held beside the next chunk's
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        # in place, for they are large; autograd refuses a second backward pass
        return hidden_gradient.mul_(grad_output), weight_gradient.mul_(grad_output), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to ``total`` in the precision of ``total``.

    On CUDA a product of half-precision matrices is float32 before it is rounded, and can stay so.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        # 17% faster than a product and then a sum, measured on an H200
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's summed loss, and its gradient with respect to ``logits`` in their dtype.

    ``logits`` may be overwritten.
    """
    losses, gradient = _losses_and_probabilities(logits, targets)
    minus_one = gradient.new_full((1, 1), -1.0).expand(len(targets), 1)
    gradient.scatter_add_(1, targets[:, None], minus_one)
    return losses.sum(), gradient.to(logits.dtype)


def _losses_and_probabilities(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p(target) of each row, and the probabilities.

    ``logits`` may be overwritten: on CPU softmax in place is several times as fast as a
    log-softmax. The logarithm of a probability that may have underflowed is never taken:
    -log p(target) is the largest logit less the target's, less the log of the largest p.
    """
    dtype = _softmax_dtype(logits.dtype)
    distance = logits.amax(1).to(dtype) - logits.gather(1, targets[:, None])[:, 0].to(dtype)
    is_in_place = logits.device.type == "cpu" and logits.dtype == dtype
    probabilities = torch.softmax(logits, -1, dtype, out=logits if is_in_place else None)
    return distance - probabilities.amax(1).log(), probabilities


@lru_cache(maxsize=1)
def _compile_loss_and_gradient() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_loss_and_gradient)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _matmul_dtype(hidden_states: Tensor) -> torch.dtype:
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden_states.dtype


def _disable_autocast(hidden_states: Tensor) -> torch.autocast:
    """Casts are made explicitly, once for all chunks."""
    return torch.autocast(hidden_states.device.type, enabled=False)


def _iter_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = LOSS_CHUNK_TOKENS.get(tensors[0].device.type, LOSS_CHUNK_TOKENS["cuda"])
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
