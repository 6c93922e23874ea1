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


def stale(task, probe):
    """Answer from a copy of what was there, as a stale mount shows it."""
    folder = Path(probe.replace("runs", "stale"))
    folder.mkdir(parents=True)
    (folder / "driver").write_text((Path(probe) / "driver").read_text())
    return task(str(folder))


@pytest.mark.parametrize(
    ("far", "problem"),
    [
        (lambda task, probe: task(probe.replace("runs", "nowhere")), "far has no "),
        (
            lambda task, probe: task(probe.replace("runs", "local")),
            "or another one than the driver",
        ),
        (stale, "far writes files that do not arrive here"),
        (
            lambda *_: RuntimeError("Traceback:\n  deep\nNo module named 'kvlab'"),
            "far cannot run kvlab: No module named 'kvlab'",
        ),
    ],
)
def test_a_machine_that_does_not_share_it_is_named_with_the_reason(folder, tmp_path, far, problem):
    (tmp_path / "local" / "sweeps" / "s").mkdir(parents=True)

    def everywhere(task, probe):
        return {"near": task(probe), "far": far(task, probe)}

    with pytest.raises(UsageError, match="is not shared by 1 of 2 machines") as caught:
        check(folder, everywhere)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(folder) == []
