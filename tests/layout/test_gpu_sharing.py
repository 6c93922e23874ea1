"""How many trials share a device."""

import os

import pytest

from kvlab.errors import ResourceError
from kvlab.layout import gpu_sharing
from kvlab.layout.gpu_sharing import (
    CONTEXT_BYTES,
    MAX_TRIALS_PER_DEVICE,
    PEAK_MARGIN,
    allocator_share,
    device_share,
    trials_per_device,
)

GB = 10**9


@pytest.mark.parametrize("device", [8 * GB, 24 * GB, 141 * GB])
@pytest.mark.parametrize("peak", [GB // 10, 2 * GB, 11 * GB])
def test_as_many_as_fit_and_not_one_more(device, peak):
    count = trials_per_device(peak, device)
    each = peak * PEAK_MARGIN + CONTEXT_BYTES
    assert count == 1 or count * each <= device
    assert count == MAX_TRIALS_PER_DEVICE or (count + 1) * each > device
    share = device_share(count)
    assert count * share <= 1, "Ray gives no more than the device"
    assert (count + 1) * share > 1, "and no more than count at once"
    if count > 1:
        allowed = allocator_share(share, device) * device
        assert allowed >= peak, "what was measured fits into what is allowed"
        assert count * (allowed + CONTEXT_BYTES) <= device, "contexts and all"


def test_a_known_case():
    # 80 GB, 7 GB a trial: 7.7 + 0.805 GB each
    assert trials_per_device(7 * GB, 80 * GB) == 9
    assert device_share(9) == 0.1111
    with pytest.raises(ResourceError, match=r"resources\.gpus = 0\.05 of 14\.9 GiB is less than"):
        allocator_share(0.05, 16 * GB)


MPS = """#!/bin/sh
[ "$1" = -d ] && { echo "sees ${CUDA_VISIBLE_DEVICES-all}" >"$CUDA_MPS_PIPE_DIRECTORY/control"; exit 0; }
read command && [ "$command" = quit ] && rm "$CUDA_MPS_PIPE_DIRECTORY/control"
"""


@pytest.mark.parametrize(
    ("probe", "is_serving"),
    [("", True), ("import time; time.sleep(60)", False)],  # accepts and never answers
)
def test_mps_is_started_once_and_ended_if_no_process_can_use_it(
    tmp_path, monkeypatch, probe, is_serving
):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(gpu_sharing, "MPS_START_SECONDS", 0.5)
    monkeypatch.setattr(gpu_sharing.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"] + os.pathsep + str(tmp_path / "bin"))
    monkeypatch.setattr(gpu_sharing, "MPS_CONTROL", "toy-mps-control")
    monkeypatch.setattr(gpu_sharing, "MPS_PROBE", probe)
    assert gpu_sharing.start_mps() is False, "there is no such program"
    assert "take turns: toy-mps-control is not here" in gpu_sharing.describe_sharing()
    program = tmp_path / "bin" / "toy-mps-control"
    program.parent.mkdir()
    program.write_text(MPS)
    program.chmod(0o755)
    assert "at the same time" in gpu_sharing.describe_sharing()
    assert gpu_sharing.start_mps() is gpu_sharing.is_mps_running() is is_serving
    if is_serving:
        assert (tmp_path / "control").read_text() == "sees all\n", "not one trial's device alone"
    said = "at the same time" if is_serving else "take turns: NVIDIA's MPS was started here"
    assert said in gpu_sharing.describe_sharing()
    assert gpu_sharing.start_mps() is is_serving, "it runs on"
    gpu_sharing.stop_mps()
    assert not gpu_sharing.is_mps_running()
