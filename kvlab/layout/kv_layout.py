"""The KV layout: which layer reads and writes which cache slot, and its exact size in bytes.

A *slot* is one pair of K and V buffers. Its number is that of the lowest layer which uses it.
A global slot holds every token of the context, a local one a ring of ``min(window, context)``.
Its heads and its window are those of the layers that share it, which are of one kind.
All sizes are exact integers; ``dtype`` is the model's, used where ``kv_dtype`` is ``model``.
"""

from dataclasses import dataclass
from functools import cached_property

from kvlab.humanize import format_count
from kvlab.sharing import KIND_NAMES, owner_map, tied_slots
from kvlab.spec import ServingConfig
from kvlab.spec.dtypes import DTYPES, BlockRule
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.serving_config import SCORE_BYTES, VOTE_BYTES, EvictionRule


@dataclass(frozen=True)
class KVLayout:
    """Slots of a model under a serving configuration.

    Attributes:
        owners: for every layer, the slot that it reads.
        writers: for every layer, whether it computes K/V and writes its slot. Under the tie
            rule ``overwrite`` that is every layer with K/V projections, in depth order, so the
            last one's values stay; under ``owner`` only the slot's first layer.
        layers: for every layer, its heads, window and what a token stores.
        kv_group: numbers of a head that share a scale; None for the default of ``kv_dtype``.
        eviction: which tokens the slots of global layers keep; None for all.
        blocks: when tokens are quantized, where ``kv_dtype`` quantizes them in blocks; else None.
    """

    owners: tuple[int, ...]
    writers: tuple[bool, ...]
    layers: tuple[LayerConfig, ...]
    kv_dtype: str = "model"
    kv_group: int | None = None
    blocks: BlockRule | None = None
    eviction: EvictionRule | None = None

    @classmethod
    def of(cls, model: ModelConfig, serving: ServingConfig | None = None) -> "KVLayout":
        """Return the layout of ``model`` under ``serving`` (default: untied, the model's dtype).

        Raises:
            SharingError: the tie is not possible on these layers.
        """
        serving = serving or ServingConfig()
        tie = owner_map(serving.tie, model.layer_kinds)
        slots = tied_slots(model.kv_owners, tie, serving.tie_rule)
        writing = slots if serving.tie_rule == "owner" else model.kv_owners
        return cls(
            owners=slots,
            writers=tuple(owner == layer for layer, owner in enumerate(writing)),
            layers=model.layers,
            kv_dtype=serving.kv_dtype,
            kv_group=serving.kv.resolve_group(model),
            blocks=serving.kv.blocks,
            eviction=serving.resolve_eviction(model, slots),
        )

    def find_eviction(self, layer: LayerConfig, context_length: int) -> EvictionRule | None:
        """Return which tokens of a context the slot of such a layer keeps; None for all."""
        rule = self.eviction
        drops = rule is not None and layer.window is None and rule.drops(context_length)
        return rule if drops else None

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The slots, in depth order."""
        return tuple(sorted(set(self.owners)))

    def storage_dtype(self, dtype: str) -> str:
        """Return the dtype in which K and V of a model of ``dtype`` are stored."""
        return dtype if self.kv_dtype == "model" else self.kv_dtype

    def slot_length(self, layer: int, context_length: int) -> int:
        """Return how many tokens of a context a layer's slot holds: all, the last ``window``, or
        those that eviction keeps."""
        rule = self.find_eviction(self.layers[layer], context_length)
        count = self.layers[layer].visible_tokens if rule is None else rule.count_entries
        return count(context_length)

    def seen_tokens(self, layer: int, context_length: int) -> int:
        """Return how many tokens of a context the query of the newest one attends to."""
        rule = self.find_eviction(self.layers[layer], context_length)
        count = self.layers[layer].visible_tokens if rule is None else rule.count_held
        return count(context_length)

    def token_bytes(self, layer: int, dtype: str = "float32") -> int:
        """Return the bytes of one token in a layer's slot: K and V of every head, with scales.

        Where tokens are quantized in blocks: the share of a quantized token in its block, rounded
        up.
        """
        if self.blocks is None:
            stored = DTYPES[self.storage_dtype(dtype)]
            return stored.token_bytes(self.layers[layer].stored, self.kv_group)
        if not self.blocks.quantizes(self.layers[layer].window):
            return self._full_token_bytes(layer, dtype)
        return -(-self._block_bytes(layer) // self.blocks.group)

    def slot_bytes(self, layer: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes that a context takes in a layer's slot."""
        if self.blocks is not None:
            blocks, full = self.blocks.capacity(context_length, self.layers[layer].window)
            return blocks * self._block_bytes(layer) + full * self._full_token_bytes(layer, dtype)
        rule = self.find_eviction(self.layers[layer], context_length)
        scores = rule.slot_score_bytes * self.layers[layer].stored[0].count if rule else 0
        return self.slot_length(layer, context_length) * self.token_bytes(layer, dtype) + scores

    @cached_property
    def depends_on_passes(self) -> bool:
        """Whether what tokens store depends on which of them ran in one pass.

        So it is where several layers write a slot (``tie_rule: overwrite``): a layer reads its own
        K/V of this pass's tokens, and the last writer's of older ones.
        """
        written = [slot for slot, writes in zip(self.owners, self.writers, strict=True) if writes]
        return len(written) > len(set(written))

    def keeps_all_tokens(self, context_length: int) -> bool:
        """Whether a cache of such a context still has all that any of its first tokens read.

        Not with windows, eviction, or blocks that tokens enter when they are old.
        """
        return self.blocks is None and not any(
            layer.sink_tokens or layer.window > 1
            if layer.window is not None
            else self.find_eviction(layer, context_length)
            for layer in (self.layers[slot] for slot in self.slots)
        )

    def segment_bytes(
        self, start: int, end: int, context_length: int, dtype: str = "float32"
    ) -> int:
        """Return the bytes that the tokens from ``start`` to ``end`` add for good.

        They are those of slots that drop no token of a context of ``context_length``. Where
        tokens are quantized in blocks: of the blocks that become complete.
        """
        total = 0
        for slot in self.slots:
            layer = self.layers[slot]
            if layer.window is not None or self.find_eviction(layer, context_length):
                continue
            if self.blocks is None:
                total += (end - start) * self.token_bytes(slot, dtype)
            else:
                added = self.blocks.quantized_tokens(end) - self.blocks.quantized_tokens(start)
                total += added // self.blocks.group * self._block_bytes(slot)
        return total

    def snapshot_bytes(self, length: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes of what ``length`` tokens store that further ones overwrite.

        With `segment_bytes` of these tokens, that is all that the next token reads.
        """
        total = 0
        for slot in self.slots:
            layer = self.layers[slot]
            rule = self.find_eviction(layer, context_length)
            if self.blocks is not None:
                blocks, full = self.blocks.snapshot(length, layer.window)
                total += len(blocks) * self._block_bytes(slot)
                total += len(full) * self._full_token_bytes(slot, dtype)
            elif layer.window is not None:
                sinks, first = min(layer.sink_tokens, length), max(0, length - layer.window + 1)
                total += (sinks + length - max(sinks, first)) * self.token_bytes(slot, dtype)
            elif rule is not None:
                held, scores = rule.count_held(length), 0
                if rule.prompt is None:
                    scores = held * rule.slot_score_bytes // rule.keep
                elif rule.is_voting(length):
                    scores = rule.slot_score_bytes
                total += held * self.token_bytes(slot, dtype) + layer.stored[0].count * scores
        return total

    def _full_token_bytes(self, layer: int, dtype: str) -> int:
        """Return the bytes of one token in full precision, in a layer's slot."""
        return self.layers[layer].store_width * DTYPES[dtype].item_bytes

    def _block_bytes(self, layer: int) -> int:
        """Return the bytes of a block: keys with scales by channel, values with scales by token."""
        assert self.blocks is not None
        stored, tokens = DTYPES[self.kv_dtype], self.blocks.group
        key, *others = self.layers[layer].stored
        codes = tokens * (key.size // stored.numbers_per_item) * stored.item_bytes
        keys = key.count * (codes + key.size * stored.scale_bytes)
        return keys + tokens * stored.token_bytes(others, self.kv_group)

    def stored_bytes(self, batch_size: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes that ``batch_size`` sequences of ``context_length`` tokens take."""
        return batch_size * sum(self.slot_bytes(slot, context_length, dtype) for slot in self.slots)

    def read_bytes(self, batch_size: int, context_length: int, dtype: str = "float32") -> int:
        """Return the bytes of K/V read to decode one token of each sequence, its own included.

        Every layer reads its slot, a shared one too: sharing across layers saves storage, not
        reads (MLKV, arXiv 2406.09297).
        """
        total = 0
        for number, layer in enumerate(self.layers):
            rule = self.find_eviction(layer, context_length)
            if self.blocks is not None:
                blocks, full = self.blocks.seen(context_length, layer.window)
                total += blocks * self._block_bytes(number)
                total += full * self._full_token_bytes(number, dtype)
            elif rule is not None and rule.prompt is not None:  # the votes are read no more
                total += rule.count_held(context_length) * self.token_bytes(number, dtype)
            else:
                total += self.slot_bytes(number, context_length, dtype)
        return batch_size * total

    def written_bytes(self, batch_size: int, dtype: str = "float32") -> int:
        """Return the bytes of K/V written to decode one token of each sequence."""
        written = [layer for layer, writes in enumerate(self.writers) if writes]
        total = sum(self.token_bytes(layer, dtype) for layer in written)
        if self.blocks is not None:  # each token once in full precision, and then in its block
            quantized = (n for n in written if self.blocks.quantizes(self.layers[n].window))
            total += sum(self._full_token_bytes(layer, dtype) for layer in quantized)
        return batch_size * total

    def bytes_per_token(self, dtype: str = "float32") -> int:
        """Return the bytes of one token in all slots together, while it is in every window."""
        return sum(self.token_bytes(slot, dtype) for slot in self.slots)

    def bytes_per_token_at_limit(self, dtype: str = "float32") -> int:
        """Return the bytes that each further token of a long context adds: to global slots.

        Zero where these evict, unless they drop tokens of the prompt alone.
        """
        if self.eviction is not None and self.eviction.prompt is None:
            return 0
        unbounded = (slot for slot in self.slots if self.layers[slot].window is None)
        return sum(self.token_bytes(slot, dtype) for slot in unbounded)

    def formula(self, batch_size: int, context_length: int, dtype: str = "float32") -> str:
        """Return the arithmetic of `stored_bytes` as text."""
        terms: dict[str, list[str]] = {}  # what slots of one size hold, by the bytes of a token
        of_votes: list[str] = []
        for kind in sorted({self.layers[slot].kind for slot in self.slots}):
            slots = [slot for slot in self.slots if self.layers[slot].kind == kind]
            layer = self.layers[slots[0]]
            count = format_count(len(slots), f"{KIND_NAMES.get(kind, kind)} slot")
            if self.blocks is not None:
                blocks, full = self.blocks.capacity(context_length, layer.window)
                size = f"{self._full_token_bytes(slots[0], dtype):,} bytes in full precision"
                text = f"{full} tokens x {size}"
                if blocks:
                    size = f"{self._block_bytes(slots[0]):,} bytes of {self.blocks.group} tokens"
                    text = f"{format_count(blocks, 'block')} x {size} + {text}"
                terms[f"({text})"] = [count]
                continue
            text = f"{count} x {self.slot_length(slots[0], context_length)} tokens"
            token = self._token_formula(slots[0], dtype)
            rule, heads = self.find_eviction(layer, context_length), layer.stored[0].count
            if rule is not None and rule.prompt is not None:
                votes = f"{rule.prompt - rule.recent} tokens x {VOTE_BYTES} bytes of votes"
                of_votes.append(f"{count} x {heads} heads x {votes}")
            elif rule is not None:
                text += " kept"
                if rule.is_scored:
                    token = f"({token} + {heads} heads x {SCORE_BYTES} bytes of scores)"
            terms.setdefault(token, []).append(text)
        products = [f"({' + '.join(tokens)}) x {token}" for token, tokens in terms.items()]
        products += of_votes
        total = self.stored_bytes(batch_size, context_length, dtype)
        whole = products[0] if len(products) == 1 else f"({' + '.join(products)})"
        return f"batch {batch_size} x {whole} = {total:,} bytes"

    def _token_formula(self, layer: int, dtype: str) -> str:
        """Return the arithmetic of `token_bytes` as text."""
        stored, config = DTYPES[self.storage_dtype(dtype)], self.layers[layer]
        parts = []
        for part in config.stored:
            packed = f" / {stored.numbers_per_item}" if stored.numbers_per_item > 1 else ""
            vector = f"{part.size}{packed} x {format_count(stored.item_bytes, 'byte')}"
            if stored.is_quantized:
                scales = part.size // stored.group_size(part.size, self.kv_group)
                count = f"{scales} x " if scales > 1 else ""
                unit = "scales" if count else "scale"
                vector = f"({vector} + {count}{stored.scale_bytes} for the {unit})"
            parts.append(f"{format_count(part.count, part.name)} x {vector}")
        if config.kv == "separate":
            return f"2 (K, V) x {parts[0]}"
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
