"""A layout at other scales: exact bytes, and the least time of a step on a device.

The roofline says what is impossible; how near to it a device comes is measured, and the range of
that is put over the projected times by whoever prints them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.layout.cost import parameter_count
from kvlab.layout.dtypes import ITEM_BYTES
from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.roofline import Bound, Ceilings, StepCost, step_cost
from kvlab.layout.transfer import transfer
from kvlab.spec.experiment import Shape

SCALES = ("gpt2-xl", "llama-7b", "video-30b", "gpt3-175b")
CONTEXTS = (1024, 16_384)
BATCHES = (1, 64)


@dataclass(frozen=True)
class Projected:
    """One size at one batch and context. ``seconds`` is the roofline's time of a decode step."""

    size: str
    batch_size: int
    context_length: int
    kv_bytes: int
    weight_bytes: int
    cost: StepCost
    seconds: float
    bound: Bound


def project(shape: Shape, size: str, ceilings: Ceilings) -> Iterator[Projected]:
    """The shape's reductions on a preset, at every one of `CONTEXTS` and `BATCHES`, in the dtype
    of the ceilings.

    Raises:
        TransferError: the layout means nothing at that size.
    """
    target, dtype = transfer(shape, size), ceilings.dtype
    model, serving = target.model, target.serving
    weights = parameter_count(model) * ITEM_BYTES[dtype]
    for context in CONTEXTS:
        for batch in BATCHES:
            cost = step_cost(model, serving, batch, context, dtype)
            yield Projected(
                size,
                batch,
                context,
                KVLayout.of(model, serving).stored_bytes(batch, context, dtype),
                weights,
                cost,
                cost.seconds(ceilings),
                cost.bound(ceilings),
            )
