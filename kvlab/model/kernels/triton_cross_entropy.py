"""A CUDA kernel in Triton: cross-entropy with its gradient. `kvlab.model.loss` has its reference.

Shapes: N tokens, V words.
"""

import torch
from torch import Tensor

from kvlab.model.kernels.triton_runtime import jit, tl, triton

VOCABULARY_BLOCK = 4096
"""Logits of a row that a program reads at a time."""


def cross_entropy_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target) (N,) in float32, and replace the logits by their gradient.

    The gradient is that of the sum of losses, in the dtype of the logits. They are read twice and
    written once, and nothing else of their size exists, as in Liger-Kernel (arXiv 2410.10989).

    Args:
        logits: (N, V), contiguous rows.
        targets: (N,) of int64, each below V.
    """
    count, words = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    block = min(VOCABULARY_BLOCK, triton.next_power_of_2(words))
    _cross_entropy_row[count,](
        logits, targets, losses, words, logits.stride(0), block, num_warps=8
    )  # fmt: skip
    return losses


@jit
def _cross_entropy_row(logits, targets, losses, words, row_stride, BLOCK: tl.constexpr):
    """Compute one row's loss, and overwrite its logits by softmax - one-hot(target)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    of_target = tl.load(logits + target).to(tl.float32)
    steps = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, words, BLOCK):  # each lane has a running maximum of its own
        word = first + steps
        x = tl.load(logits + word, mask=word < words, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        is_finite = new_largest > -float("inf")
        total = total * tl.where(is_finite, tl.exp(largest - new_largest), 0.0)
        total += tl.where(is_finite, tl.exp(x - new_largest), 0.0)
        largest = new_largest
    of_row = tl.max(largest, 0)
    sum_of_row = tl.sum(total * tl.exp(largest - of_row), 0)
    tl.store(losses + row, tl.log(sum_of_row) + of_row - of_target)
    for first in range(0, words, BLOCK):
        word = first + steps
        x = tl.load(logits + word, mask=word < words, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - of_row) / sum_of_row - tl.where(word == target, 1.0, 0.0)
        tl.store(logits + word, gradient.to(logits.dtype.element_ty), mask=word < words)
