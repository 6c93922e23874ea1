"""Which layer reads whose K/V: patterns to owner maps. Pure arithmetic."""

from kvlab.sharing.owners import merge_owner_maps as merge_owner_maps
from kvlab.sharing.owners import owner_map as owner_map
from kvlab.sharing.owners import tied_slots as tied_slots
from kvlab.sharing.patterns import KIND_NAMES as KIND_NAMES
from kvlab.sharing.patterns import PATTERNS as PATTERNS
from kvlab.sharing.patterns import SharingError as SharingError
from kvlab.sharing.patterns import SharingPattern as SharingPattern
