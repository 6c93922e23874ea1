"""The KV layout: which layer reads and writes which cache slot, and its exact size in bytes.

A *slot* is what the layers that share K/V have in common: one pair of K and V buffers. Its number
is that of the lowest layer which uses it. Its heads and its window are those of the layers that
share it, which are of one kind. How it stores tokens is its plan (`kvlab.layout.slot_plan`); a
layout sums over plans. All sizes are exact integers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from kvlab.humanize import format_count
from kvlab.layout.slot_plan import SlotPlan, TokenSlot
from kvlab.layout.state_slot import StateSlot
from kvlab.own_extensions import find_members
from kvlab.sharing import KIND_NAMES
from kvlab.spec.dtypes import KVStorage
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.serving_config import ServingConfig


@dataclass(frozen=True)
class KVLayout:
    """Slots of a model under a serving configuration.

    Attributes:
        owners: for every layer, the slot that it reads.
        writers: for every layer, whether it computes K/V and writes its slot. Under the tie
            rule ``overwrite`` that is every layer with K/V projections, in depth order, so the
            last one's values stay; under ``owner`` only the slot's first layer.
        plans: for every layer, how the slot that it reads stores tokens.
    """

    owners: tuple[int, ...]
    writers: tuple[bool, ...]
    plans: tuple[SlotPlan, ...]

    @classmethod
    def of(cls, model: ModelConfig, serving: ServingConfig | None = None) -> "KVLayout":
        """Return the layout of ``model`` under ``serving`` (default: untied, the model's dtype).

        Raises:
            SharingError: the tie is not possible on these layers.
        """
        serving = serving or ServingConfig()
        slots = serving.find_slots(model)
        writing = slots if serving.tie_rule == "owner" else model.kv_owners
        by_layer = {layer: _plan_slot(layer, model, serving) for layer in set(model.layers)}
        alike: dict[SlotPlan, list[int]] = {}
        for slot in sorted(set(slots)):
            alike.setdefault(by_layer[model.layers[slot]], []).append(slot)
        plans = {
            slot: plan.of_place(place, len(own))
            for plan, own in alike.items()
            for place, slot in enumerate(own)
        }
        return cls(
            owners=slots,
            writers=tuple(owner == layer for layer, owner in enumerate(writing)),
            plans=tuple(plans[slot] for slot in slots),
        )

    @classmethod
    def of_training(cls, model: ModelConfig, kv: KVStorage) -> "KVLayout":
        """Return the layout of a cache of which a training reads K and V: it stores them by ``kv``,
        untied (`training.kv_dtype`)."""
        return cls.of(model, ServingConfig(**kv.settings))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The slots, in depth order."""
        return tuple(sorted(set(self.owners)))

    @cached_property
    def last_readers(self) -> frozenset[int]:
        """The layer of each slot that reads it last in a pass."""
        return frozenset({owner: layer for layer, owner in enumerate(self.owners)}.values())

    @cached_property
    def first_reader(self) -> int:
        """The layer from which on none writes K/V; the number of layers if the last one writes.

        Of a prompt these layers compute the last token alone.
        """
        return find_first_reader(self.writers)

    @cached_property
    def _slot_plans(self) -> tuple[SlotPlan, ...]:
        return tuple(self.plans[slot] for slot in self.slots)

    def identity(self) -> dict[str, Any]:
        """Return what is computed, as plain data, equal for all spellings of it."""
        facts: dict[str, Any] = {"slots": list(self.owners), "writers": list(self.writers)}
        for plan in self.plans:
            facts |= plan.identity()
        return facts

    def storage_dtype(self, dtype: str) -> str:
        """Return the dtype in which K and V of a model of ``dtype`` are stored."""
        tokens = (plan for plan in self.plans if plan.layer.stores_tokens)
        return next((plan.storage_dtype(dtype) for plan in tokens), dtype)

    @cached_property
    def depends_on_passes(self) -> bool:
        """Whether what tokens store depends on which of them ran in one pass.

        So it is where several layers write a slot (``tie_rule: overwrite``): a layer reads its own
        K/V of this pass's tokens, and the last writer's of older ones.
        """
        written = [slot for slot, writes in zip(self.owners, self.writers, strict=True) if writes]
        return len(written) > len(set(written))

    def keeps_all_tokens(self, context_length: int) -> bool:
        """Whether a cache of such a context still has all that any of its first tokens read."""
        return all(plan.keeps_all_tokens(context_length) for plan in self._slot_plans)

    def stored_bytes(self, batch_size: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes that ``batch_size`` sequences of ``context_length`` tokens take."""
        return batch_size * sum(p.stored_bytes(context_length, dtype) for p in self._slot_plans)

    def read_bytes(self, batch_size: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes of K/V read to decode one token of each sequence, its own included.

        Every layer reads its slot, a shared one too: sharing across layers saves storage, not
        reads (MLKV, arXiv 2406.09297).
        """
        return batch_size * sum(plan.read_bytes(context_length, dtype) for plan in self.plans)

    def written_bytes(self, batch_size: int, dtype: str = "float32") -> int:
        """Return the bytes of K/V written to decode one token of each sequence."""
        written = zip(self.plans, self.writers, strict=True)
        return batch_size * sum(plan.written_bytes(dtype) for plan, writes in written if writes)

    def bytes_per_token(self, dtype: str = "float32") -> int:
        """Return the bytes of one token in all slots together, while it is in every window."""
        return sum(plan.token_bytes(dtype) for plan in self._slot_plans)

    def bytes_per_token_at_limit(self, dtype: str = "float32") -> int:
        """Return the bytes that each further token of a long context adds."""
        return sum(plan.growth_bytes(dtype) for plan in self._slot_plans)

    def segment_bytes(
        self, start: int, end: int, context_length: int, dtype: str = "float32"
    ) -> int:
        """Return the bytes that the tokens from ``start`` to ``end`` add for good.

        They are those of slots that drop no token of a context of ``context_length``.
        """
        segment = start, end, context_length, dtype
        return sum(plan.segment_bytes(*segment) for plan in self._slot_plans)

    def snapshot_bytes(self, length: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes of what ``length`` tokens store that further ones overwrite.

        With `segment_bytes` of these tokens, that is all that the next token reads.
        """
        return sum(p.snapshot_bytes(length, context_length, dtype) for p in self._slot_plans)

    def formula(self, batch_size: int, context_length: int, dtype: str = "float32") -> str:
        """Return the arithmetic of `stored_bytes` as text."""
        terms: dict[str, list[str]] = {}  # what slots hold, by the bytes of each
        counts = Counter(self._slot_plans)
        for plan in sorted(counts, key=lambda plan: plan.layer.kind):
            kind = plan.layer.kind
            count = format_count(counts[plan], f"{KIND_NAMES.get(kind, kind)} slot")
            for held, size in plan.formula(count, context_length, dtype):
                terms.setdefault(size, []).append(held)
        products = [f"({' + '.join(held)}) x {size}" for size, held in terms.items()]
        total = self.stored_bytes(batch_size, context_length, dtype)
        whole = products[0] if len(products) == 1 else f"({' + '.join(products)})"
        return f"batch {batch_size} x {whole} = {total:,} bytes"


def find_first_reader(writers: Sequence[bool]) -> int:
    """Return the layer from which on none writes, given for each layer whether it does."""
    return 1 + max(layer for layer, writes in enumerate(writers) if writes)


@cache
def _list_rules() -> tuple[Callable[..., SlotPlan | None], ...]:
    return tuple(find_members("slot_plans").values())


def _plan_slot(layer: LayerConfig, model: ModelConfig, serving: ServingConfig) -> SlotPlan:
    if not layer.stores_tokens:
        return StateSlot(layer)
    for rule in _list_rules():
        plan: SlotPlan | None = rule(layer, model, serving)
        if plan is not None:
            return plan
    return TokenSlot(layer, serving.kv.dtype, serving.kv.resolve_group(model), serving.kv.rotate)
