"""Give every test its own data folder."""

from tests.data.conftest import data_home  # noqa: F401
