"""The radix tree of a prefix cache: which texts are stored, and up to where they agree.

A node has a run of tokens that all texts below it have in common. Its key is their ids. Where what
tokens store depends on the passes that they ran in (`KVLayout.depends_on_passes`), it also says
where passes begin: a key always determines what is stored, and so the same tokens may be there
several times.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlab.cache.kv_cache import KVCache
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

    def segment_bytes(self, start: int, end: int) -> int:
        return self.layout.segment_bytes(start, end, self.context_length, self.dtype)

    def snapshot_bytes(self, length: int) -> int:
        return self.layout.snapshot_bytes(length, self.context_length, self.dtype)

    def state_bytes(self, length: int) -> int:
        """Return the bytes of all that goes on from ``length`` tokens."""
        return self.segment_bytes(0, length) + self.snapshot_bytes(length)

    def count_units(self, start: int, end: int) -> int:
        """Return how many tokens or blocks (U) a segment has in each tensor."""
        blocks = self.layout.blocks
        if blocks is None:
            return end - start
        return (blocks.quantized_tokens(end) - blocks.quantized_tokens(start)) // blocks.group

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
