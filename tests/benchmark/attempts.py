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
class Broken:
    def __call__(self, batch):
        raise ValueError(f"no such thing as {batch}")


@dataclass(frozen=True)
class Littered:
    """Takes as many bytes as the batch, with ``more`` allowed and ``freed`` kept from before."""

    freed: int
    more: int

    def __call__(self, batch):
        from kvlab.benchmark.memory_probe import limit_private_memory

        block = 100_000  # malloc takes this much from its heap, and larger blocks from the system
        blocks = [bytearray(block) for _ in range(self.freed // block)]
        after = bytearray(block)  # so that the heap cannot shrink
        del blocks
        limit_private_memory(self.more)
        assert len(bytearray(batch)) == batch
        assert len(after) == block


@dataclass(frozen=True)
class Killed:
    def __call__(self, _batch):
        os.kill(os.getpid(), 9)


@dataclass(frozen=True)
class Crashing:
    """Crashes where its limit is below what it needs, as a library that never looks; ``broken``:
    without a limit too."""

    limit: int | None
    broken: bool = False

    def __call__(self, batch):
        if self.broken or (self.limit is not None and batch > self.limit):
            os.kill(os.getpid(), 11)

    def without_limit(self):
        return Free(self.broken)


@dataclass(frozen=True)
class Free:
    broken: bool

    def __call__(self, batch):
        Crashing(None, self.broken)(batch)
