"""Cross-layer K/V sharing patterns: which layers form a group that shares one K/V.

A pattern is a function ``groups(argument, kinds)``. ``argument`` is the text after the colon,
``"2"`` in ``adjacent:2``; ``kinds`` has one letter a layer, such as ``"G"`` for global or ``"L"``
for local. It returns groups of layers of one kind, of which the lowest layer owns the K/V; layers
in no group own theirs. `PATTERNS` is the one table of this family: a new pattern is a function and
a line.
"""

from collections.abc import Callable
from dataclasses import dataclass

LayerGroups = list[list[int]]
Sharing = str | list[list[int]] | list[int] | tuple[tuple[int, ...], ...] | tuple[int, ...]


KIND_NAMES = {"G": "global", "L": "local"}
"""The kinds of layers that need no definition. Others are called by their letter."""


class SharingError(ValueError):
    """A sharing is unknown or impossible; the text follows ``kv_sharing = x``."""


@dataclass(frozen=True)
class SharingPattern:
    """One member of the family.

    Attributes:
        usage: how it is written, as in ``adjacent:N``.
        groups: the function that gives its groups.
    """

    usage: str
    groups: Callable[[str, str], LayerGroups]


def no_groups(argument: str, _kinds: str) -> LayerGroups:
    """`none`: every layer owns its K/V."""
    _reject_argument(argument)
    return []


def adjacent_groups(argument: str, kinds: str) -> LayerGroups:
    """`adjacent:N`: runs of N layers of one kind share (CLA-N, arXiv 2405.12981).

    Layers are counted within each kind in depth order. The last run may be shorter, so the
    number of owners rounds up: 20 layers in threes keep 7.
    """
    size = _parse_count(argument, "adjacent:2")
    return [
        layers[start : start + size]
        for layers in _layers_by_kind(kinds)
        for start in range(0, len(layers), size)
    ]


CHARACTER_AI_BLOCK = 6


def character_ai_groups(argument: str, kinds: str) -> LayerGroups:
    """`character-ai`: the grouping of the Character.AI article's code, by position in blocks of 6.

    Layers 0, 6, 12, ... share one cache; in each block the next three share, and the last two. On
    12 layers: [0,6] [1,2,3] [4,5] [7,8,9] [10,11]. (The article's prose says two, then three.)
    """
    _reject_argument(argument)
    layers = list(range(len(kinds)))
    groups = [layers[::CHARACTER_AI_BLOCK]]
    for start in groups[0]:
        groups += [layers[start + 1 : start + 4], layers[start + 4 : start + 6]]
    return [group for group in groups if group]


def trailing_groups(argument: str, kinds: str) -> LayerGroups:
    """`trailing:K`: the last K layers read the last owner of their kind below them.

    The top layers reuse what the lower ones computed, as in YOCO (arXiv 2405.05254) and Gemma 3n.
    """
    count = _parse_count(argument, "trailing:4")
    first_consumer = len(kinds) - count
    groups = []
    for layers in _layers_by_kind(kinds):
        owners = [layer for layer in layers if layer < first_consumer]
        consumers = layers[len(owners) :]
        if consumers and not owners:
            kind = KIND_NAMES.get(kinds[consumers[0]], kinds[consumers[0]])
            text = f"leaves no {kind} owner below the last {count} of {len(kinds)} layers"
            raise SharingError(f"{text}; use a number up to {len(kinds) - 1 - layers[0]}")
        if consumers:
            groups.append([owners[-1], *consumers])
    return groups


def sandwich_groups(argument: str, kinds: str) -> LayerGroups:
    """`sandwich`: the first and the last layer of each kind own their K/V, all between share.

    "KeepEnds" in the cross-layer attention paper (arXiv 2405.12981) keeps both ends of the stack
    apart in the same way; here the middle is one group.
    """
    _reject_argument(argument)
    return [layers[1:-1] for layers in _layers_by_kind(kinds) if len(layers) > 2]


def _layers_by_kind(kinds: str) -> LayerGroups:
    """Return the layers of each kind that occurs, in depth order."""
    return [[i for i, kind in enumerate(kinds) if kind == k] for k in sorted(set(kinds))]


def _reject_argument(argument: str) -> None:
    if argument:
        raise SharingError("takes no number; leave out the colon")


def _parse_count(argument: str, example: str) -> int:
    if not argument.isdecimal() or len(argument) > 6 or int(argument) < 1:
        raise SharingError(f"needs a whole number of at least 1, such as {example}")
    return int(argument)


PATTERNS: dict[str, SharingPattern] = {
    "none": SharingPattern("none", no_groups),
    "adjacent": SharingPattern("adjacent:N", adjacent_groups),
    "character-ai": SharingPattern("character-ai", character_ai_groups),
    "trailing": SharingPattern("trailing:K", trailing_groups),
    "sandwich": SharingPattern("sandwich", sandwich_groups),
}
