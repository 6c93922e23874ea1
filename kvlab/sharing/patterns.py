"""The contract of a sharing pattern, and what its members share.

A pattern is a function ``groups(argument, kinds) -> list of groups``: ``argument`` is the
text after the colon (``"2"`` in ``adjacent:2``), ``kinds`` one letter a layer. Each group is
a list of layers of one kind; its lowest layer owns. Layers in no group own themselves.
"""

from collections.abc import Callable

LayerGroups = list[list[int]]
Sharing = str | list[list[int]] | list[int] | tuple[tuple[int, ...], ...] | tuple[int, ...]


class SharingError(ValueError):
    """A sharing that is not known or not possible; the text goes after ``kv_sharing = x``."""


def layers_by_kind(kinds: str) -> LayerGroups:
    """The layers of each kind that occurs, in depth order."""
    return [[i for i, kind in enumerate(kinds) if kind == k] for k in "GL" if k in kinds]


def reject_argument(argument: str) -> None:
    if argument:
        raise SharingError("takes no number; leave out the colon")


def parse_count(argument: str, least: int, example: str) -> int:
    if not argument.isdecimal() or len(argument) > 6 or int(argument) < least:
        raise SharingError(f"needs a whole number of at least {least}, such as {example}")
    return int(argument)


# `none`: every layer owns its K/V.


def no_groups(argument: str, _kinds: str) -> LayerGroups:
    reject_argument(argument)
    return []


# `adjacent:N`: runs of N layers of one kind share (CLA-N, arXiv 2405.12981).
#
# Counted within each kind in depth order; the last run may be shorter, so the number of owners
# rounds up: 20 layers in threes keep 7.


def adjacent_groups(argument: str, kinds: str) -> LayerGroups:
    size = parse_count(argument, 1, "adjacent:2")
    return [
        layers[start : start + size]
        for layers in layers_by_kind(kinds)
        for start in range(0, len(layers), size)
    ]


# `character-ai`: the grouping of the Character.AI article's code, by position in blocks of six.
#
# Layers 0, 6, 12, ... share one cache; in each block the next three share, and the last two. On
# 12 layers: [0,6] [1,2,3] [4,5] [7,8,9] [10,11]. (The article's prose says two, then three.)


CHARACTER_AI_BLOCK = 6


def character_ai_groups(argument: str, kinds: str) -> LayerGroups:
    reject_argument(argument)
    depth = len(kinds)
    found = [list(range(0, depth, CHARACTER_AI_BLOCK))]
    for start in range(0, depth, CHARACTER_AI_BLOCK):
        found += [
            [layer for layer in range(start + low, start + high) if layer < depth]
            for low, high in ((1, 4), (4, 6))
        ]
    return [group for group in found if group]


# `trailing:K`: the last K layers read the last owner of their kind below them.
#
# The top layers reuse what the lower ones computed, as in YOCO (arXiv 2405.05254) and Gemma 3n.


def trailing_groups(argument: str, kinds: str) -> LayerGroups:
    last = parse_count(argument, 1, "trailing:4")
    first_consumer = len(kinds) - last
    found = []
    for layers in layers_by_kind(kinds):
        owners = [layer for layer in layers if layer < first_consumer]
        consumers = [layer for layer in layers if layer >= first_consumer]
        if consumers and not owners:
            kind = "global" if kinds[consumers[0]] == "G" else "local"
            raise SharingError(
                f"leaves no {kind} owner below the last {last} of {len(kinds)} layers;"
                f" use a number up to {len(kinds) - 1 - layers[0]}"
            )
        if consumers:
            found.append([owners[-1], *consumers])
    return found


# `sandwich`: the first and the last layer of each kind keep their own K/V, all between share.
#
# "KeepEnds" in the cross-layer attention paper (arXiv 2405.12981) keeps both ends of the stack
# apart in the same way; here the middle is one group.


def sandwich_groups(argument: str, kinds: str) -> LayerGroups:
    reject_argument(argument)
    return [layers[1:-1] for layers in layers_by_kind(kinds) if len(layers) > 2]


# The sharing patterns, one file each: ``pattern(argument, kinds) -> groups of layers``.


PATTERNS: dict[str, Callable[[str, str], LayerGroups]] = {
    "none": no_groups,
    "adjacent": adjacent_groups,
    "character-ai": character_ai_groups,
    "trailing": trailing_groups,
    "sandwich": sandwich_groups,
}
