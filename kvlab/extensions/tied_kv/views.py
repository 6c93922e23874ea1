# ruff: noqa: ARG002 (not every view of K and V uses all arguments)
"""Read K and V from one tensor. Shapes are those of `kvlab.model.attention`."""

from torch import Tensor

from kvlab.model.attention import Attend, Parts, Reads, SeparateKV
from kvlab.model.decode_attention import Keys
from kvlab.model.rope import PassRotation, RopeTable, apply_rope


class TiedKV(SeparateKV):
    """One tensor serves as V and, rotated, as K.

    It is stored unrotated. Without rotary positions K and V share one memory.
    """

    is_rotated_on_read = True

    def store(self, parts: Parts, rope: RopeTable | None) -> Parts:
        return parts

    def attend(self, q: Tensor, parts: Reads, rope: RopeTable | None, attend: Attend) -> Tensor:
        (kv,) = parts
        return attend(q, Keys(kv, table=rope), kv)


class RotatedTiedKV(SeparateKV):
    """One tensor serves as K and as V, stored rotated. What is attended to is rotated back by the
    query's position, so it has values rotated by their distance."""

    def store(self, parts: Parts, rope: RopeTable | None) -> Parts:
        return (apply_rope(parts[0], rope),)

    def attend(self, q: Tensor, parts: Reads, rope: RopeTable | None, attend: Attend) -> Tensor:
        (kv,) = parts
        return attend(q, Keys(kv), kv)

    def restore(self, y: Tensor, rotation: PassRotation | None) -> Tensor:
        return y if rotation is None else apply_rope(y, rotation.inverse)


class GroupedTiedKV(SeparateKV):
    """Grouped-tied attention (GTA, arXiv 2505.21487, section 3.3).

    One tensor is V. K is a rotary key that all heads share, beside the first half of V.
    """

    def store(self, parts: Parts, rope: RopeTable | None) -> Parts:
        kv, rotary_key = parts
        return kv, apply_rope(rotary_key, rope)

    def attend(self, q: Tensor, parts: Reads, rope: RopeTable | None, attend: Attend) -> Tensor:
        kv, rotary_key = parts
        return attend(q, Keys(kv, shared=rotary_key, width=kv.shape[-1] // 2), kv)
