"""Commands run as if nothing was set in the environment."""

import pytest

from tests.support.tiny_sweep import OUTER_VARIABLES


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in OUTER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
