"""Owner maps: ``owners[layer]`` is the layer whose K/V that layer reads, itself if it owns.

In a valid map an owner is at or below its consumers and owns itself, and all layers of a
group are of one kind, such as ``"G"`` global or ``"L"`` local; so layer 0 always owns. Sharing
across kinds would hand a global layer a cache that has dropped tokens, or heads of another form.
"""

from collections.abc import Sequence
from functools import lru_cache

from kvlab.sharing.patterns import KIND_NAMES, PATTERNS, Sharing, SharingError, SharingPattern

OwnerMap = tuple[int, ...]


def owner_map(sharing: Sharing, kinds: str) -> OwnerMap:
    """Return the owner of every layer.

    Args:
        sharing: a pattern of `PATTERNS` such as ``adjacent:2``, explicit groups
            (``[[0, 6], [1, 2]]``; layers not named own themselves) or an explicit owner map
            (``[0, 0, 2, 2]``).
        kinds: one letter a layer, such as ``"G"`` or ``"L"``.

    Raises:
        SharingError: the sharing is unknown, or impossible on these layers.
    """
    if isinstance(sharing, str):
        name, _, argument = sharing.partition(":")
        if name not in PATTERNS:
            names = ", ".join(PATTERNS)
            raise SharingError(f"is not a known pattern; use {names}, groups or owners")
        return _pattern_owners(PATTERNS[name], argument, kinds)
    if all(isinstance(item, int) for item in sharing):
        owners = tuple(item for item in sharing if isinstance(item, int))
    else:
        owners = _group_owners([g for g in sharing if not isinstance(g, int)], kinds)
    _check_owner_map(owners, kinds)
    return owners


@lru_cache(maxsize=4096)  # a plan of thousands of cells asks for the same few
def _pattern_owners(pattern: SharingPattern, argument: str, kinds: str) -> OwnerMap:
    owners = _group_owners(pattern.groups(argument, kinds), kinds)
    _check_owner_map(owners, kinds)
    return owners


def _check_owner_map(owners: OwnerMap, kinds: str) -> None:
    """Raise SharingError unless ``owners`` is a valid map for these layers."""
    if len(owners) != len(kinds):
        raise SharingError(f"names {len(owners)} owners for {len(kinds)} layers; name one a layer")
    for layer, owner in enumerate(owners):
        text = f"makes layer {layer} read layer {owner}"
        if not 0 <= owner <= layer:
            raise SharingError(f"{text}; an owner is at or below its consumer")
        if owners[owner] != owner:
            hint = f"name layer {owners[owner]} as the owner of both"
            raise SharingError(f"{text}, which itself reads layer {owners[owner]}; {hint}")
        if kinds[owner] != kinds[layer]:
            one, other = (KIND_NAMES.get(kinds[i], kinds[i]) for i in (owner, layer))
            text = f"joins {one} layer {owner} and {other} layer {layer}"
            raise SharingError(f"{text}; the layers of a group are of one kind")


def merge_owner_maps(first: OwnerMap, second: OwnerMap) -> OwnerMap:
    """Return the finest owner map in which layers joined by either map are joined."""
    merged = list(range(len(first)))

    def root(layer: int) -> int:
        while merged[layer] != layer:
            layer = merged[layer]
        return layer

    for owners in (first, second):
        for layer, owner in enumerate(owners):
            low, high = sorted((root(layer), root(owner)))
            merged[high] = low
    return tuple(root(layer) for layer in range(len(first)))


@lru_cache(maxsize=4096)
def tied_slots(trained: OwnerMap, tie: OwnerMap, rule: str) -> OwnerMap:
    """Return the cache slot of every layer when ``tie`` joins caches at serving.

    Args:
        trained: the owner map that the model was trained with.
        rule: ``serving.tie_rule``, ``overwrite`` or ``owner``.

    Raises:
        SharingError: under ``overwrite``, a layer that was trained to read another's K/V would
            find those of a third layer in the slot, which writes in between.
    """
    slots = merge_owner_maps(trained, tie)
    writer: dict[int, int] = {}
    for layer, slot in enumerate(slots):
        if trained[layer] == layer:
            writer[slot] = layer
        elif rule == "overwrite" and writer[slot] != trained[layer]:
            text = f"makes layer {writer[slot]} overwrite the K/V of layer {trained[layer]} before"
            text = f"{text} layer {layer}, its trained consumer, reads them"
            raise SharingError(f"{text}; use tie_rule: owner, or join fewer layers")
    return slots


def _group_owners(groups: Sequence[Sequence[int]], kinds: str) -> OwnerMap:
    owners = list(range(len(kinds)))
    grouped: set[int] = set()
    for group in groups:
        for layer in group:
            if not 0 <= layer < len(kinds):
                raise SharingError(f"names layer {layer}; layers are 0 to {len(kinds) - 1}")
            if layer in grouped:
                raise SharingError(f"names layer {layer} twice; groups do not overlap")
            grouped.add(layer)
            owners[layer] = min(group)
    return tuple(owners)
