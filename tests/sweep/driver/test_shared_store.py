"""Whether other machines share the store. Here they are other folders."""

import os
from pathlib import Path

import pytest

from kvlab.errors import UsageError
from kvlab.sweep.driver import preparation
from kvlab.sweep.driver.preparation import check_store_is_shared


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "PATIENCE_SECONDS", 0.3)
    return tmp_path / "runs" / "sweeps" / "s"


def check(folder, everywhere):
    check_store_is_shared(folder.parent.parent, folder, everywhere, timeout=0.3)


def test_a_shared_store_passes_and_nothing_stays(folder):
    probes = []

    def everywhere(task, probe):
        probes.append(probe)
        return {"one": task(probe), "two": task(probe)}

    check(folder, everywhere)
    assert len(probes) == 1
    assert os.listdir(folder) == []


def test_a_machine_without_that_folder_is_named(folder):
    def everywhere(task, probe):
        return {"near": task(probe), "far": task(probe.replace("runs", "nowhere"))}

    with pytest.raises(UsageError, match=r"by 1 of 2 machines.*: far has no .*; name one with"):
        check(folder, everywhere)
    assert os.listdir(folder) == []


def test_a_folder_of_the_same_name_is_not_the_same(folder, tmp_path):
    (tmp_path / "local" / "sweeps" / "s").mkdir(parents=True)

    def everywhere(task, probe):
        return {"far": task(probe.replace("runs", "local"))}

    with pytest.raises(UsageError, match="far has another"):
        check(folder, everywhere)


def test_what_a_machine_writes_must_arrive(folder, tmp_path):
    def everywhere(task, probe):  # a copy of what was there, as a stale mount shows it
        stale = Path(probe.replace("runs", "stale"))
        stale.mkdir(parents=True)
        (stale / "driver").write_text((Path(probe) / "driver").read_text())
        return {"far": task(str(stale))}

    with pytest.raises(UsageError, match="far writes files that do not arrive here"):
        check(folder, everywhere)
    assert len(list(tmp_path.glob("stale/sweeps/s/*/*"))) == 2


def test_a_machine_that_fails_is_told_in_one_line(folder):
    def everywhere(task, probe):  # noqa: ARG001
        return {"far": RuntimeError("Traceback:\n  deep\nNo module named 'kvlab'")}

    with pytest.raises(UsageError, match="far cannot run kvlab: No module named 'kvlab'") as caught:
        check(folder, everywhere)
    assert "\n" not in str(caught.value)
