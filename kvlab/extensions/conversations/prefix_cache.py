"""A prefix cache between turns: a radix tree over token ids, whose nodes hold K/V.

A request takes over the K/V of the longest prefix of its tokens that an earlier one has stored, and
computes the rest (RadixAttention, arXiv 2312.07104). Generated tokens are part of the tree like
those of prompts, and nothing is rounded to blocks.

A slot that keeps all tokens is stored by segments: a node has those of its own tokens. Rings,
slots that evict and KIVI's newest tokens are overwritten as a text goes on. Of them a node may
have a *snapshot*, the state at its end. So a prefix is usable where every segment is there and a
snapshot, if the layout needs one. What is copied back is bit for bit what was stored.

One list of least recent use in one byte budget: a use is a hit, or a row that is stored. Where
snapshots are needed they are the entries of the list, and segments go as soon as no snapshot needs
them. A snapshot is *superseded* if its node has one continuation, so that a later turn of the same
conversation has a longer one; those go first.

A node of the tree has a run of tokens that all texts below it have in common. Its key is their ids.
Where what tokens store depends on the passes that they ran in (`KVLayout.depends_on_passes`), it
also says where passes begin: a key always determines what is stored, and so the same tokens may be
there several times.

Shapes: B rows, H heads of a part, S entries of a buffer, U tokens or blocks of a segment, D width.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.cache.kv_buffer import as_bytes
from kvlab.cache.kv_cache import KVCache
from kvlab.cache.slot_pass import EntryRange
from kvlab.errors import CacheError
from kvlab.layout import KVLayout

Ids = NDArray[np.int64]
"""Token ids."""

Key = NDArray[np.int64]
"""Token ids; where what they store depends on passes, twice that, plus 1 where a pass begins."""


class Node:
    """The tokens from `start` to `end` of all texts below it, and what they store."""

    def __init__(self, tree: "PrefixTree", key: Key, start: int, segment: tuple[Tensor, ...]):
        self.tree, self.key, self.segment = tree, key, segment
        self.start, self.end = start, start + len(key)
        self.children: dict[int, Node] = {}
        self.parent: Node | None = None
        self.snapshot: tuple[Tensor, ...] | None = None
        self.last_used = 0

    @property
    def is_entry(self) -> bool:
        """Whether it may be dropped by itself."""
        return self.snapshot is not None or self.tree.keeps_all_tokens

    @property
    def is_superseded(self) -> bool:
        """Whether all texts that have its snapshot have a longer one."""
        return not self.tree.keeps_all_tokens and len(self.children) == 1

    @property
    def priority(self) -> tuple[bool, int, int]:
        """The order in which entries go: superseded ones first, then the least recently used."""
        return (not self.is_superseded, self.last_used, -self.end)

    @property
    def nbytes(self) -> int:
        """Bytes by the layout's formula."""
        snapshot = 0 if self.snapshot is None else self.tree.snapshot_bytes(self.end)
        return self.tree.segment_bytes(self.start, self.end) + snapshot

    def attach(self, parent: "Node") -> None:
        self.parent = parent
        parent.children[int(self.key[0])] = self

    def detach(self) -> None:
        """Mark it as no part of the tree any more, and free its memory."""
        self.parent, self.segment, self.snapshot = None, (), None

    def walk(self) -> Iterator["Node"]:
        """Yield it and all nodes below it, parents first."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())


class PrefixTree:
    """The texts of one set of weights under one layout."""

    def __init__(self, cache: KVCache):
        self.layout: KVLayout = cache.layout
        self.dtype = str(cache.dtype).removeprefix("torch.")
        self.context_length = cache.max_length
        self.keeps_all_tokens = self.layout.keeps_all_tokens(self.context_length)
        self.root = Node(self, np.empty(0, np.int64), 0, ())
        # the plan of the slot of each tensor of a segment
        self._tensor_plans = [
            cache.layout.plans[slot]
            for slot, buffer in cache.buffers.items()
            for tensors, _ in buffer.list_segment(0, 1)
            for _ in tensors
        ]

    def segment_bytes(self, start: int, end: int) -> int:
        return self.layout.segment_bytes(start, end, self.context_length, self.dtype)

    def snapshot_bytes(self, length: int) -> int:
        return self.layout.snapshot_bytes(length, self.context_length, self.dtype)

    def state_bytes(self, length: int) -> int:
        """Return the bytes of all that goes on from ``length`` tokens."""
        return self.segment_bytes(0, length) + self.snapshot_bytes(length)

    def count_units(self, start: int, end: int) -> list[int]:
        """Return how many entries (U) each tensor of a segment has."""
        return [plan.count_units(start, end, self.context_length) for plan in self._tensor_plans]

    def make_key(self, tokens: Ids, pass_starts: Sequence[int]) -> Key:
        if not self.layout.depends_on_passes:
            return tokens
        key = tokens * 2
        key[list(pass_starts)] += 1
        return key

    def split_key(self, key: Key) -> tuple[Ids, list[int]]:
        """Return the tokens of a key, and where their passes begin, if that counts."""
        if not self.layout.depends_on_passes:
            return key, []
        return key >> 1, np.flatnonzero(key & 1).tolist()

    def match_key(self, key: Key) -> tuple[list[Node], int]:
        """Return the nodes that begin ``key``, the last perhaps in part, and how far they do."""
        path: list[Node] = []
        node, depth = self.root, 0
        while depth == node.end and depth < len(key) and int(key[depth]) in node.children:
            node = node.children[int(key[depth])]
            path.append(node)
            depth += count_common(node.key, key[depth:])
        return path, depth

    def match_tokens(self, tokens: Ids) -> Iterator[tuple[Node, int]]:
        """Yield the nodes on the way of ``tokens``, and how far each agrees with them.

        Where what tokens store depends on passes, there may be several for the same tokens.
        """
        nodes, does_depend = [self.root], self.layout.depends_on_passes
        while nodes:
            node = nodes.pop()
            if node.end == len(tokens):
                continue
            token = int(tokens[node.end])
            for first in (2 * token, 2 * token + 1) if does_depend else (token,):
                child = node.children.get(first)
                if child is None:
                    continue
                ids, _ = self.split_key(child.key)
                depth = child.start + count_common(ids, tokens[child.start :])
                yield child, depth
                if depth == child.end:
                    nodes.append(child)

    def find_hit(self, tokens: Ids) -> tuple[Node, int]:
        """Return the node and the length of the longest usable prefix of ``tokens``."""
        best, length = self.root, 0
        for node, depth in self.match_tokens(tokens):
            if not self.keeps_all_tokens and (depth < node.end or node.snapshot is None):
                continue
            if (depth, node.last_used) > (length, best.last_used):
                best, length = node, depth
        return best, length


def count_common(first: Key, second: Key) -> int:
    """Return how many elements two keys begin with in common."""
    count = min(len(first), len(second))
    differs = first[:count] != second[:count]
    return int(differs.argmax()) if differs.any() else count


def path_to(node: Node) -> list[Node]:
    """Return the nodes from the root, which is included, to ``node``."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def join_keys(path: Sequence[Node]) -> Key:
    """Return the key of all tokens on a path from the root."""
    return np.concatenate([node.key for node in path])


Tokens = Sequence[int] | Ids


class PrefixCache:
    """K/V of earlier texts, by their tokens, within a budget of bytes.

    One object serves any weights and layouts: entries of one are never given to another. Token ids
    and the tree itself, some bytes a token, are not counted.

    Args:
        bytes_budget: the most bytes of K/V that are held at any time.
        snapshot_every: tokens C between the snapshots of a prompt, see `list_pass_ends`; and the
            most tokens of one node.

    Attributes:
        evictions: snapshots, or segments where no snapshots are needed, dropped for their bytes.

    Raises:
        ValueError: a number is outside its range.
    """

    def __init__(self, bytes_budget: int, *, snapshot_every: int = 256):
        if bytes_budget < 0:
            raise ValueError(f"bytes_budget = {bytes_budget} is below 0; 0 stores nothing")
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every = {snapshot_every} is below 1; use 1 or more")
        self.bytes_budget, self.snapshot_every = bytes_budget, snapshot_every
        self.evictions = 0
        self._trees: dict[tuple[Hashable, ...], PrefixTree] = {}
        self._bytes = self._clock = 0

    @property
    def bytes_held(self) -> int:
        """Bytes of K/V that it holds."""
        return self._bytes

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that it holds."""
        return [t for n in self._walk() for t in (*n.segment, *(n.snapshot or ()))]

    def list_entries(self) -> list[Node]:
        """Return the nodes of the entries, in the order in which they would be dropped."""
        entries = (node for node in self._walk() if node.is_entry and node.parent)
        return sorted(entries, key=lambda node: node.priority)

    def _walk(self) -> Iterator[Node]:
        return (node for tree in self._trees.values() for node in tree.root.walk())

    @torch.no_grad()
    def restore(self, tokens: Tokens, cache: KVCache, *, weights: Hashable) -> int:
        """Fill an empty ``cache`` of one row with the longest stored prefix of ``tokens``.

        The prefix is shorter than ``tokens``, so that a token is left whose logits are computed.

        Args:
            tokens: of a whole prompt.
            weights: names the weights of the model, such as a training's fingerprint.

        Returns:
            The tokens that the cache now holds.

        Raises:
            CacheError: the cache is not empty.
        """
        if cache.length:
            raise CacheError(f"the cache holds {cache.length} tokens; restore into an empty one")
        ids = np.asarray(tokens, dtype=np.int64)
        tree = self._find_tree(weights, cache)
        node, length = tree.find_hit(ids[: max(0, min(len(ids) - 1, cache.max_length))])
        path = path_to(node)
        for node in path[1:]:
            end = min(node.end, length)
            units = tree.count_units(node.start, end)
            ranges = _list_segment(cache, node.start, end)
            _write_entries(ranges, [t[:, :n] for t, n in zip(node.segment, units, strict=True)])
        if node.snapshot is not None and node.end == length:
            _write_entries(_list_snapshot(cache, length), node.snapshot)
        _, pass_starts = tree.split_key(join_keys(path)[:length])
        cache.fill(length, pass_starts)
        self._use(path)
        return length

    @torch.no_grad()
    def insert(self, tokens: Tokens, cache: KVCache, *, weights: Hashable) -> None:
        """Store what a ``cache`` of one row holds: all its tokens, and a snapshot at their end.

        Nothing is stored, and nothing evicted, if it is more than the whole budget.

        Args:
            tokens: prompt and generated alike; those that it does not hold yet, such
                as the last generated one, are left out.
            weights: names the weights of the model, such as a training's fingerprint.

        Raises:
            CacheError: the cache holds more tokens than ``tokens``.
        """
        ids, length = np.asarray(tokens, dtype=np.int64), cache.length
        if len(ids) < length:
            text = f"the cache holds {length} tokens, and tokens are {len(ids)}"
            raise CacheError(f"{text}; give all that have been run")
        tree = self._find_tree(weights, cache)
        if not length or tree.state_bytes(length) > self.bytes_budget:
            return
        key = tree.make_key(ids[:length], cache.list_pass_starts())
        path = self._split_at_end(*tree.match_key(key))
        self._store([tree.root, *path], key, cache)

    def list_pass_ends(
        self, tokens: Tokens, start: int, cache: KVCache, *, weights: Hashable
    ) -> list[int]:
        """Return where the passes of a prefill from ``start`` should end, the whole text last.

        A ring holds its last tokens alone, so a snapshot is taken between two passes, by `insert`.
        It pays every `snapshot_every` tokens, and where the text departs from a stored one: what
        two texts have in common may be common to more.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        tree = self._find_tree(weights, cache)
        if tree.keeps_all_tokens:
            return [len(ids)]
        ends = {*range(0, len(ids), self.snapshot_every), len(ids)}
        ends.add(max((depth for _, depth in tree.match_tokens(ids)), default=0))
        return sorted(end for end in ends if end > start)

    def _find_tree(self, weights: Hashable, cache: KVCache) -> PrefixTree:
        layout, tree = cache.layout, PrefixTree(cache)
        # a slot may keep all of a short context, and drop some of a longer one
        keeps = tuple(plan.keeps_all_tokens(cache.max_length) for plan in layout.plans)
        return self._trees.setdefault((weights, layout, tree.dtype, keeps), tree)

    def _split_at_end(self, path: list[Node], depth: int) -> list[Node]:
        """Return ``path`` so that it ends at ``depth``: its last node is split if it goes on."""
        if not path or path[-1].end == depth:
            return path
        *whole, node = path
        # a split copies both halves, so that either can be freed alone
        needed = node.tree.segment_bytes(node.start, node.end)
        while node.parent is not None and self._bytes + needed > self.bytes_budget:
            self._evict_one(whole)
        # if the node was evicted itself, `_store` copies its tokens from the cache
        return whole if node.parent is None else [*whole, self._split(node, depth)]

    def _split(self, node: Node, depth: int) -> Node:
        """Replace a node by two; return the upper one."""
        tree, parent, count = node.tree, node.parent, depth - node.start
        assert parent is not None, "the root has no tokens"
        halves = [
            (_join([t[:, :units]]), _join([t[:, units:]]))
            for t, units in zip(node.segment, tree.count_units(node.start, depth), strict=True)
        ]
        upper = Node(tree, node.key[:count].copy(), node.start, tuple(half[0] for half in halves))
        lower = Node(tree, node.key[count:].copy(), depth, tuple(half[1] for half in halves))
        lower.children, lower.snapshot = node.children, node.snapshot
        lower.last_used = upper.last_used = node.last_used
        lower.attach(upper)
        upper.attach(parent)
        node.detach()
        for child in lower.children.values():
            child.parent = lower
        return upper

    def _store(self, path: list[Node], key: Key, cache: KVCache) -> None:
        """Store what the cache has beyond ``path``, and a snapshot at its end if one is needed."""
        parent, tree, length = path[-1], path[-1].tree, len(key)
        is_new = parent.end < length or not parent.is_entry
        added = tree.segment_bytes(parent.end, length)
        added += tree.snapshot_bytes(length) if is_new else 0
        while self._bytes + added > self.bytes_budget:
            self._evict_one(path)
        nodes = []
        for start in range(parent.end, length, self.snapshot_every):
            end = min(length, start + self.snapshot_every)
            segment = tuple(map(_join, _read_entries(_list_segment(cache, start, end))))
            nodes.append(Node(tree, key[start:end].copy(), start, segment))
        for upper, lower in pairwise(nodes):
            lower.attach(upper)
        if is_new and not tree.keeps_all_tokens:
            snapshot = _read_entries(_list_snapshot(cache, length))
            (nodes or path)[-1].snapshot = tuple(map(_join, snapshot))
        if nodes:
            nodes[0].attach(parent)
        self._bytes += added
        self._use([*path, *nodes])

    def _use(self, path: list[Node]) -> None:
        """Make a hit's nodes the most recently used: the snapshot, or all segments on the path.

        A node is always more recent than those below it, so that the oldest is a leaf.
        """
        used = path if path[-1].tree.keeps_all_tokens else path[-1:]
        for node in reversed(used):
            self._clock += 1
            node.last_used = self._clock

    def _evict_one(self, path: list[Node]) -> None:
        """Drop the entry of the lowest priority, and the segments that it alone needed.

        Args:
            path: nodes whose segments stay.
        """
        stays = set(path)
        entries = (one for one in self._walk() if one.is_entry and one.parent)
        may_go = (one for one in entries if not (one.tree.keeps_all_tokens and one in stays))
        node = min(may_go, key=lambda one: one.priority)
        self.evictions += 1
        if node.snapshot is not None:
            self._bytes -= node.tree.snapshot_bytes(node.end)
            node.snapshot = None
        if node.tree.keeps_all_tokens:
            self._remove(node)
            return
        while node.parent and not node.children and node.snapshot is None and node not in stays:
            node = self._remove(node)

    def _remove(self, node: Node) -> Node:
        """Remove a node without children; return its parent."""
        parent = node.parent
        assert parent is not None, "the root stays"
        assert not node.children, "a leaf"
        del parent.children[int(node.key[0])]
        node.detach()
        self._bytes -= node.tree.segment_bytes(node.start, node.end)
        return parent


def _join(pieces: list[Tensor]) -> Tensor:
    """Return a copy of ``pieces`` (H, U, ...), joined along U."""
    return torch.cat([as_bytes(piece) for piece in pieces], 1).view(pieces[0].dtype)


def _list_segment(cache: KVCache, start: int, end: int) -> list[EntryRange]:
    return [r for buffer in cache.buffers.values() for r in buffer.list_segment(start, end)]


def _list_snapshot(cache: KVCache, length: int) -> list[EntryRange]:
    return [r for buffer in cache.buffers.values() for r in buffer.list_snapshot(length)]


def _read_entries(ranges: Iterable[EntryRange]) -> Iterator[list[Tensor]]:
    """Yield the entries (H, U, ...) of each tensor, in pieces along U."""
    for tensors, entries in ranges:
        for tensor in tensors:
            yield [tensor[0][:, part] for part in entries]


def _write_entries(ranges: Iterable[EntryRange], sources: Iterable[Tensor]) -> None:
    """Copy ``sources`` (H, U, ...) into the entries of each tensor."""
    for pieces, source in zip(_read_entries(ranges), sources, strict=True):
        parts = torch.split(source, [piece.shape[1] for piece in pieces], 1)
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part)
