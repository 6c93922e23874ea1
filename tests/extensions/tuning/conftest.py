"""What the tests of tuning begin with."""

from tests.sweep.conftest import store  # noqa: F401
