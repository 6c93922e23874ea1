"""What the tests of looks begin with."""

from tests.sweep.conftest import store  # noqa: F401
