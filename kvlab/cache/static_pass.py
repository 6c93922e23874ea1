"""A decode step with fixed shapes and addresses, which can be captured and compiled.

Shapes: B rows, H heads of a part, D its width.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KVContext
from kvlab.cache.formats import ScaledCodes
from kvlab.cache.kv_buffer import KVBuffer, index_kv

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache

StoreCodes = Callable[[Tensor, ScaledCodes, Tensor], None]
"""Takes a part (B, H, 1, D), the buffer's codes and the entry (B,) of each row's token."""


class StaticPass(AttentionPass):
    """One token a row, rows of any lengths, with fixed shapes and addresses, for CUDA graphs.

    Positions live on the device. The entry of position p of a row is visible once p is reached,
    in a ring as in a linear buffer: every entry of a ring that has wrapped holds a token of the
    window.

    Args:
        store_codes: stores a part's tokens as codes, a byte each; default in torch.

    Attributes:
        read_limit: entries from here on are not read; no row may use them yet.
    """

    def __init__(self, cache: "KVCache", store_codes: StoreCodes | None):
        assert cache.has_static_pass, "every slot has fixed shapes"
        self._cache, self._store_codes = cache, store_codes
        self._row_positions = cache.row_lengths
        self.positions = self._row_positions[:, None]  # a view, which advances with them
        self.end = self.position_limit = cache.max_length + 1  # one captured step serves all
        self.read_limit = cache.max_length
        self._held = cache.list_lengths()
        self._rows = torch.arange(cache.batch_size, device=cache.device)
        self._made: dict[Hashable, Tensor] = {}  # tensors of this step, which layers share

    def _find_buffer(self, layer: int) -> KVBuffer:
        buffer = self._cache.buffers[self._cache.layout.owners[layer]]
        assert isinstance(buffer, KVBuffer), "it has fixed shapes"
        return buffer

    def writes_kv(self, layer: int) -> bool:
        return self._cache.layout.writers[layer]

    def read_kv(self, layer: int) -> KVContext:
        buffer = self._find_buffer(layer)
        count, device = min(buffer.size, self.read_limit), self._cache.device
        visible = self._share(
            ("visible", count),
            lambda: torch.arange(count, device=device) <= self._row_positions[:, None, None, None],
        )
        counts = self._share("counts", lambda: self._row_positions + 1)
        return KVContext(buffer.read_step(slice(0, count)), visible, counts=counts)

    def _share(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return ``make()``, called once in a step for all layers."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def key_positions(self, layer: int) -> Tensor:
        buffer = self._find_buffer(layer)
        return self._share(
            ("keys", buffer.sinks, buffer.ring),
            lambda: buffer.stored_positions(self._row_positions + 1)[:, : self.read_limit],
        )

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        buffer = self._find_buffer(layer)
        is_stored_so = all(f.has_codes and f.dtype != torch.uint8 for f in buffer.formats)
        if self._store_codes is None or not is_stored_so or torch.compiler.is_compiling():
            index = (self._rows, slice(None), self._find_entries(buffer))
            encoded = index_kv(buffer.encode(parts), (slice(None), slice(None), 0))
            buffer.write(index, encoded)
            return
        for kv_format, values, stored in zip(buffer.formats, parts, buffer.parts, strict=True):
            rotated, entries = kv_format.rotate(values), self._find_entries(buffer)
            self._store_codes(rotated, ScaledCodes(*stored), entries)

    def _find_entries(self, buffer: KVBuffer) -> Tensor:
        name = "entries", buffer.sinks, buffer.ring
        return self._share(name, lambda: buffer.find_entries(self._row_positions))

    def end_layer(self, layer: int) -> None:
        """Do nothing: a token is stored at once."""

    def prepare(self) -> None:
        """Move to the tokens that the cache holds now: a captured step does not see it change.

        Raises:
            CacheError: a row has no space for one more token.
        """
        self._cache.check_space(1)
        held = self._cache.list_lengths()
        if held != self._held:  # it was reset or filled since the last step
            self._row_positions.copy_(self._cache.row_lengths)
            self._held = held

    def finish(self) -> None:
        """Forget the tensors of this step. It does not advance, so that it may run again."""
        self._made.clear()

    def advance(self) -> None:
        """Advance by one token."""
        self._row_positions += 1
        self._cache.advance(1)
        self._held = self._cache.list_lengths()
