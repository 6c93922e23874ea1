"""Commands run as if nothing was set in the environment."""

from tests.cli.conftest import _nothing_is_set  # noqa: F401
