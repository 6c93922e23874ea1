"""One layout at other sizes: the same reductions applied to another model."""

from kvlab.spec.experiment import Shape
from kvlab.spec.model import ModelConfig
from kvlab.spec.presets import PRESETS

SIZES = ("gpt2", "gpt2-xl", "llama-7b", "video-30b", "gpt3-175b")


class TransferError(ValueError):
    """The layout means nothing at that size; the text says why."""


def transfer(shape: Shape, preset: str) -> Shape:
    """The shape's K/V reductions on a preset's model.

    Taken over: the query heads that share a K/V head (all of them for multi-query), the
    pattern of local layers with its window in tokens, the sharing and the serving.

    Raises:
        TransferError: groups or owners name layers by number, or heads do not divide.
    """
    model = shape.model
    sharings = (model.kv_sharing, shape.serving.tie)
    if not all(isinstance(sharing, str) for sharing in sharings):
        raise TransferError("its groups name layers by number")
    target = ModelConfig(**PRESETS[preset])
    group = model.n_head // model.n_kv_head
    if model.n_kv_head == 1:
        heads = 1
    elif target.n_head % group:
        raise TransferError(f"{target.n_head} heads do not divide into groups of {group}")
    else:
        heads = target.n_head // group
    fields = {
        "n_kv_head": heads,
        "window": model.window,
        "attention_pattern": model.attention_pattern,
        "kv_sharing": model.kv_sharing,
    }
    try:
        return Shape.model_validate(
            {
                "name": preset,
                "model": {**PRESETS[preset], **fields},
                "serving": shape.serving.model_dump(),
            }
        )
    except ValueError as error:
        raise TransferError(str(error).splitlines()[-1].strip()) from None
