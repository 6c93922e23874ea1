"""Which layer reads whose K/V: patterns to owner maps. Pure arithmetic."""

from kvlab.sharing.owners import merge_owner_maps, owner_map, tied_slots
from kvlab.sharing.patterns import KIND_NAMES, PATTERNS, Sharing, SharingError, SharingPattern

__all__ = [
    "KIND_NAMES",
    "PATTERNS",
    "Sharing",
    "SharingError",
    "SharingPattern",
    "merge_owner_maps",
    "owner_map",
    "tied_slots",
]
