"""Tries of a batch size whose outcome is known. Imports nothing heavy: each runs in a process."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Takes ``each`` bytes a sequence beside ``fixed`` ones, of ``memory`` in all."""

    memory: int
    fixed: int
    each: int

    def __call__(self, batch):
        if self.fixed + batch * self.each > self.memory:
            raise MemoryError
        assert len(bytearray(self.fixed + batch * self.each)) <= self.memory


@dataclass(frozen=True)
class Littered:
    """Takes as many bytes as the batch, with ``more`` allowed and ``freed`` kept from before; three
    quarters of ``more`` are there."""

    freed: int
    more: int

    def __call__(self, batch):
        from kvlab.extensions.limit.measure import limit_private_memory

        block = 100_000  # malloc takes this much from its heap, and larger blocks from the system
        blocks = [bytearray(block) for _ in range(self.freed // block)]
        after = bytearray(block)  # so that the heap cannot shrink
        del blocks
        limit_private_memory(self.more)
        try:
            assert len(bytearray(self.more * 3 // 4)) < len(after) + self.more
        except MemoryError:
            raise ValueError("what is allowed is not there") from None
        assert len(bytearray(batch)) == batch


@dataclass(frozen=True)
class Failing:
    """Fails from ``batch`` on: raises a ValueError, or ends by a signal, also ``without_limit`` or
    only with it."""

    batch: int
    signal: int | None
    heals: bool = False

    def __call__(self, batch):
        if batch < self.batch:
            return
        if self.signal is None:
            raise ValueError(f"no such thing as {batch}")
        os.kill(os.getpid(), self.signal)

    def without_limit(self):
        return Failing(10**9 if self.heals else self.batch, self.signal)
