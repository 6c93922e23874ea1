"""Fixtures for tests that start drivers in processes of their own."""

from tests.support.driver_process import interrupted_sweep, kill_started_drivers

__all__ = ["interrupted_sweep", "kill_started_drivers"]
