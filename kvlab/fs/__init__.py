"""Atomic files, leases and locks in a shared folder."""
