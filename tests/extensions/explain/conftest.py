"""Fixtures of sweeps."""

from tests.sweep.conftest import driven, planned, store  # noqa: F401
