"""The record of trials and sweeps on disk, and what is read from it. Importing needs no torch."""

from kvlab.store.store import Store
from kvlab.store.trial_records import DETAIL_FILES, Status

__all__ = ["DETAIL_FILES", "Status", "Store"]
