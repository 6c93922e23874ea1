"""A prefix that one cache holds, taken over by another."""

from kvlab.cache import KVCache


def copy_prefix(source: KVCache, target: KVCache) -> None:
    """Fill an empty cache with what another one of the same layout holds."""
    for one, other in zip(source.buffers.values(), target.buffers.values(), strict=True):
        ranges = (
            [*buffer.list_segment(0, source.length), *buffer.list_snapshot(source.length)]
            for buffer in (one, other)
        )
        for (tensors, entries), (copies, places) in zip(*ranges, strict=True):
            for tensor, copy in zip(tensors, copies, strict=True):
                for part, place in zip(entries, places, strict=True):
                    copy[0][:, place] = tensor[0][:, part]
    target.fill(source.length, source.list_pass_starts())
