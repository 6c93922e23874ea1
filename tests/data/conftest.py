"""Give every test its own data folder."""

import pytest


@pytest.fixture(autouse=True)
def data_home(tmp_path, monkeypatch):
    folder = tmp_path / "kvlab-data"
    monkeypatch.setenv("KVLAB_DATA", str(folder))
    return folder
