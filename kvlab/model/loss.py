"""Next-token loss from the residual stream, without ever holding the logits of all tokens.

N tokens, E n_embd, V vocab_size. Logits exist for one chunk of tokens at a time. Where a
gradient is wanted it is made in the forward pass, chunk by chunk, since the gradient of a sum
of losses with respect to the logits needs nothing from later layers: so nothing is computed
twice and nothing of size (N, V) is kept. The same idea is in Liger-Kernel (arXiv 2410.10989).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.layout.training_memory import LOSS_CHUNK_TOKENS
from kvlab.model.kernels.linear import matmul_transposed


def summed_loss(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, compile: bool = False
) -> Tensor:
    """The sum over tokens of -log p(target), in nats; differentiable once.

    Args:
        hidden: (..., E), the residual stream after the final norm.
        head_weight: (V, E).
        targets: (...) of int64.
        compile: fuse the passes over the logits with torch.compile.

    Under autocast the matrix products are in its dtype; softmax and sums are in float32.
    """
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    if not torch.is_grad_enabled():
        return token_losses(flat, head_weight, wanted).sum()
    out: Tensor = _SummedLossFunction.apply(flat, head_weight, wanted, compile)  # type: ignore[no-untyped-call]
    return out


def token_losses(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of every token (...), in nats; see `summed_loss`. Not differentiable."""
    return token_scores(hidden, head_weight, targets)[0]


def token_scores(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p(target) of every token (...), in nats, and whether the target is likeliest (of
    equals the first counts); see `summed_loss`. Not differentiable."""
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    dtype = _matmul_dtype(hidden)
    losses, hits = [], []
    with torch.no_grad(), _disable_autocast(hidden):
        weight = head_weight.to(dtype)
        for part, wanted_part in _iter_chunks(flat, wanted):
            logits = matmul_transposed(part.to(dtype), weight)
            hits.append(_is_argmax(logits, wanted_part))
            losses.append(_losses_and_probabilities(logits, wanted_part)[0])
    return torch.cat(losses).view(targets.shape), torch.cat(hits).view(targets.shape)


class _SummedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, fuse: bool) -> Tensor:
        dtype = _matmul_dtype(hidden)
        softmax_step = _compiled_softmax_step() if fuse else _softmax_step
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight)
        total = torch.zeros((), dtype=_softmax_dtype(dtype), device=hidden.device)
        with _disable_autocast(hidden):
            cast = weight.to(dtype)
            start = 0
            for part, wanted in _iter_chunks(hidden, targets):
                rows = part.to(dtype)
                loss, gradient = softmax_step(matmul_transposed(rows, cast), wanted)
                total += loss
                hidden_gradient[start : start + len(part)] = matmul_transposed(gradient, cast.T)
                if dtype == weight.dtype:
                    weight_gradient.addmm_(gradient.T, rows)
                else:  # chunks are summed in the weight's own precision
                    weight_gradient += gradient.T @ rows
                start += len(part)
                del gradient  # or it would stay beside the next chunk's
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        # in place, for they are large; another backward pass would be refused by autograd
        return hidden_gradient.mul_(outer), weight_gradient.mul_(outer), None, None


def _softmax_step(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss, and its gradient with respect to ``logits`` in their dtype.

    ``logits`` may be overwritten.
    """
    losses, gradient = _losses_and_probabilities(logits, targets)
    minus_one = gradient.new_full((1, 1), -1.0).expand(len(targets), 1)
    gradient.scatter_add_(1, targets[:, None], minus_one)
    return losses.sum(), gradient.to(logits.dtype)


def _losses_and_probabilities(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p(target) of each row, and the probabilities.

    ``logits`` may be overwritten: on CPU softmax in place takes a quarter of the time of a
    log-softmax. The log of a probability that may have underflowed is not taken: log p(target)
    is the target's logit less the largest, plus the log of the largest p.
    """
    dtype = _softmax_dtype(logits.dtype)
    distance = logits.amax(1).to(dtype) - logits.gather(1, targets[:, None])[:, 0].to(dtype)
    in_place = logits.device.type == "cpu" and logits.dtype == dtype
    probabilities = torch.softmax(logits, -1, dtype, out=logits if in_place else None)
    return distance - probabilities.amax(1).log(), probabilities


def _is_argmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether each row's target has its largest logit, the first of equals counting. Where the
    largest lies is looked for in such rows alone, since that takes longer than to find it."""
    hits = logits.gather(1, targets[:, None])[:, 0] == logits.amax(1)
    hits[hits.clone()] = logits[hits].argmax(1) == targets[hits]
    return hits


@lru_cache(maxsize=1)
def _compiled_softmax_step() -> Any:
    return torch.compile(_softmax_step)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _disable_autocast(hidden: Tensor) -> torch.autocast:
    """Casts are made by hand, once for all chunks."""
    return torch.autocast(hidden.device.type, enabled=False)


def _iter_chunks(hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = LOSS_CHUNK_TOKENS.get(hidden.device.type, LOSS_CHUNK_TOKENS["cuda"])
    for start in range(0, len(targets), size):
        yield hidden[start : start + size], targets[start : start + size]
