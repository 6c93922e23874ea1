"""The KV layout: which layer reads and writes which cache slot, and its exact size in bytes.

A *slot* is one pair of K and V buffers. Its number is that of the lowest layer which uses it.
A global slot holds every token of the context, a local one a ring of ``min(window, context)``.
All sizes are exact integers; ``dtype`` is the model's, used where ``kv_dtype`` is ``model``.
"""

from dataclasses import dataclass
from functools import cached_property

from kvlab.humanize import format_count
from kvlab.sharing import KIND_NAMES, owner_map, tied_slots
from kvlab.spec import ServingConfig
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.model_config import ModelConfig


@dataclass(frozen=True)
class KVLayout:
    """Slots of a model under a serving configuration.

    Attributes:
        owners: for every layer, the slot that it reads.
        writers: for every layer, whether it computes K/V and writes its slot. Under the tie
            rule ``overwrite`` that is every layer with K/V projections, in depth order, so the
            last one's values stay; under ``owner`` only the slot's first layer.
        kinds: one letter a layer, G or L.
        window: tokens that a local layer sees, itself included; None if all are global.
    """

    owners: tuple[int, ...]
    writers: tuple[bool, ...]
    kinds: str
    n_kv_head: int
    head_dim: int
    window: int | None
    kv_dtype: str = "model"

    @classmethod
    def of(cls, model: ModelConfig, serving: ServingConfig | None = None) -> "KVLayout":
        """Return the layout of ``model`` under ``serving`` (default: untied, the model's dtype).

        Raises:
            SharingError: the tie is not possible on these layers.
        """
        serving = serving or ServingConfig()
        trained = model.kv_owners
        tie = owner_map(serving.tie, model.layer_kinds)
        slots = tied_slots(trained, tie, serving.tie_rule)
        if serving.tie_rule == "owner":
            writers = tuple(slot == layer for layer, slot in enumerate(slots))
        else:
            writers = tuple(owner == layer for layer, owner in enumerate(trained))
        return cls(
            owners=slots,
            writers=writers,
            kinds=model.layer_kinds,
            n_kv_head=model.n_kv_head,
            head_dim=model.head_dim,
            window=model.window,
            kv_dtype=serving.kv_dtype,
        )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The slots, in depth order."""
        return tuple(sorted(set(self.owners)))

    @cached_property
    def last_readers(self) -> dict[int, int]:
        """For every slot, the highest layer that uses it."""
        return {slot: layer for layer, slot in enumerate(self.owners)}

    def storage_dtype(self, dtype: str) -> str:
        """Return the dtype in which K and V of a model of ``dtype`` are stored."""
        return dtype if self.kv_dtype == "model" else self.kv_dtype

    def slot_length(self, layer: int, context_length: int) -> int:
        """Return how many tokens of a context a layer's slot holds: all, or the last ``window``."""
        if self.kinds[layer] == "G" or self.window is None:
            return context_length
        return min(self.window, context_length)

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the bytes of one token in one slot: K and V of every K/V head, with scales."""
        head = DTYPES[self.storage_dtype(dtype)].vector_bytes(self.head_dim)
        return 2 * self.n_kv_head * head

    def stored_bytes(self, batch_size: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes that ``batch_size`` sequences of ``context_length`` tokens take."""
        tokens = sum(self.slot_length(slot, context_length) for slot in self.slots)
        return batch_size * tokens * self.token_bytes(dtype)

    def read_bytes(self, batch_size: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes of K/V read to decode one token of each sequence, its own included.

        Every layer reads its slot, a shared one too: sharing across layers saves storage, not
        reads (MLKV, arXiv 2406.09297).
        """
        tokens = sum(self.slot_length(layer, context_length) for layer in range(len(self.owners)))
        return batch_size * tokens * self.token_bytes(dtype)

    def written_bytes(self, batch_size: int, dtype: str = "float32") -> int:
        """Return the bytes of K/V written to decode one token of each sequence."""
        return batch_size * sum(self.writers) * self.token_bytes(dtype)

    def bytes_per_token(self, dtype: str = "float32") -> int:
        """Return the bytes of one token in all slots together, while it is in every window."""
        return len(self.slots) * self.token_bytes(dtype)

    def bytes_per_token_at_limit(self, dtype: str = "float32") -> int:
        """Return the bytes that each further token of a long context adds: to global slots."""
        return sum(self.kinds[slot] == "G" for slot in self.slots) * self.token_bytes(dtype)

    def largest_batch(self, memory: int, context_length: int, dtype: str = "float32") -> int:
        """Return how many sequences of ``context_length`` tokens fit in ``memory`` bytes."""
        return memory // self.stored_bytes(1, context_length, dtype)

    def formula(self, batch_size: int, context_length: int, dtype: str = "float32") -> str:
        """Return the arithmetic of `stored_bytes` as text."""
        stored = DTYPES[self.storage_dtype(dtype)]
        terms = []
        for kind, name in KIND_NAMES.items():
            slots = [slot for slot in self.slots if self.kinds[slot] == kind]
            if slots:
                length = self.slot_length(slots[0], context_length)
                terms.append(f"{format_count(len(slots), f'{name} slot')} x {length} tokens")
        head = f"{self.head_dim} x {stored.item_bytes} bytes"
        if stored.is_quantized:
            head = f"({head} + {stored.scale_bytes} for the scale)"
        total = self.stored_bytes(batch_size, context_length, dtype)
        tokens = " + ".join(terms)
        return (
            f"batch {batch_size} x ({tokens}) x 2 (K, V) x {self.n_kv_head} heads x {head}"
            f" = {total:,} bytes"
        )
