"""Slots that keep some tokens and drop the others: `serving.evict`. See README.md."""
