"""Which layer reads whose K/V: owner maps from patterns. Pure arithmetic."""

from kvlab.sharing.owners import merge_owner_maps, owner_map, tied_slots
from kvlab.sharing.patterns import PATTERNS, Sharing, SharingError

__all__ = ["PATTERNS", "Sharing", "SharingError", "merge_owner_maps", "owner_map", "tied_slots"]
