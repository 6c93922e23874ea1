"""One layout at other sizes: the same reductions applied to another model."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.layout.flops import parameter_count
from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.roofline_model import Bound, DevicePeaks, StepCost, decode_step_cost
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import ServedModel
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.presets import PRESETS

RESCALE_PRESETS = ("gpt2", "gpt2-xl", "llama-7b", "video-30b", "gpt3-175b")


class RescaleError(ValueError):
    """The layout means nothing at that size; the text says why."""


def rescale(shape: ServedModel, preset: str) -> ServedModel:
    """The shape's K/V reductions on a preset's model.

    Taken over: the query heads that share a K/V head (all of them for multi-query), the
    pattern of local layers with its window in tokens, the sharing and the serving.

    Raises:
        TransferError: groups or owners name layers by number, or heads do not divide.
    """
    model = shape.model
    sharings = (model.kv_sharing, shape.serving.tie)
    if not all(isinstance(sharing, str) for sharing in sharings):
        raise RescaleError("its groups name layers by number")
    target = ModelConfig(**PRESETS[preset])
    group = model.n_head // model.n_kv_head
    if model.n_kv_head == 1:
        heads = 1
    elif target.n_head % group:
        raise RescaleError(f"{target.n_head} heads do not divide into groups of {group}")
    else:
        heads = target.n_head // group
    fields = {
        "n_kv_head": heads,
        "window": model.window,
        "attention_pattern": model.attention_pattern,
        "kv_sharing": model.kv_sharing,
    }
    try:
        return ServedModel.model_validate(
            {
                "name": preset,
                "model": {**PRESETS[preset], **fields},
                "serving": shape.serving.model_dump(),
            }
        )
    except ValueError as error:
        raise RescaleError(str(error).splitlines()[-1].strip()) from None


# A layout at other scales: exact bytes, and the least time of a step on a device.
#
# The roofline says what is impossible; how near to it a device comes is measured, and the range of
# that is put over the projected times by whoever prints them.


EXTRAPOLATION_PRESETS = ("gpt2-xl", "llama-7b", "video-30b", "gpt3-175b")
CONTEXT_LENGTHS = (1024, 16_384)
BATCH_SIZES = (1, 64)


@dataclass(frozen=True)
class Extrapolation:
    """One size at one batch and context. ``seconds`` is the roofline's time of a decode step."""

    size: str
    batch_size: int
    context_length: int
    kv_bytes: int
    weight_bytes: int
    cost: StepCost
    seconds: float
    bound: Bound


def extrapolate(shape: ServedModel, size: str, ceilings: DevicePeaks) -> Iterator[Extrapolation]:
    """The shape's reductions on a preset, at every one of `CONTEXTS` and `BATCHES`, in the dtype
    of the ceilings.

    Raises:
        TransferError: the layout means nothing at that size.
    """
    target, dtype = rescale(shape, size), ceilings.dtype
    model, serving = target.model, target.serving
    weights = parameter_count(model) * DTYPES[dtype].item_bytes
    for context in CONTEXT_LENGTHS:
        for batch in BATCH_SIZES:
            cost = decode_step_cost(model, serving, batch, context, dtype)
            yield Extrapolation(
                size,
                batch,
                context,
                KVLayout.of(model, serving).stored_bytes(batch, context, dtype),
                weights,
                cost,
                cost.seconds(ceilings),
                cost.bound(ceilings),
            )
