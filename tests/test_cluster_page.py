"""The scripts of sweeps/CLUSTERS.md for Slurm, with stand-ins for srun, Ray and kvlab."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "sweeps" / "CLUSTERS.md"
SCRIPTS = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH .*?)^```$", PAGE.read_text(), re.M | re.S)

COMMANDS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\n'
    'SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; status=$?; kill $!; exit $status',
    "ray": 'echo "$*" >> "$TOLD"; [ -z "$RAY_FAILS" ] || exit 1; exec sleep 60',
    "kvlab": 'trap "exit 130" TERM\necho "$* $KVLAB_STORE" > "$TOLD.kvlab"\n'
    '[ -z "$ENDS_AS" ] || exit "$ENDS_AS"\nsleep 60 & wait',
}


@pytest.fixture
def run(tmp_path):
    """Return a function that starts a script; what its commands were told is in files."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    started = []

    def start(script, **environment):
        text = script.replace("source /shared/kvlab/.venv/bin/activate\n", "")
        assert text != script
        job = {"SLURM_JOB_ID": "1234567", "SLURM_CPUS_PER_TASK": "4", "TOLD": f"{tmp_path}/told"}
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=tmp_path, env={**os.environ, **job, **path, **environment},
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_lines(path, count):
    deadline = time.monotonic() + 20
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return path.read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_job_ends_as_kvlab_does_and_hands_on_the_signal_before_its_limit(tmp_path, run, script):
    assert len(SCRIPTS) == 2
    assert run(script, ENDS_AS="2").wait(20) == 2
    (tmp_path / "told.kvlab").unlink()
    job = run(script)
    [line] = wait_for_lines(tmp_path / "told.kvlab", 1)
    assert line.startswith("submit sweeps/character-ai.yaml --scale gpu")
    assert line.endswith(" /shared/runs")
    job.send_signal(signal.SIGTERM)  # as `--signal=B:TERM@300`: to the job's own process alone
    assert job.wait(20) == 130


def test_one_node_is_the_head_and_a_job_without_ray_ends(tmp_path, run):
    run(SCRIPTS[1])
    lines = sorted(wait_for_lines(tmp_path / "told", 2))
    own = ["--num-cpus=4", "--min-worker-port=0", "--max-worker-port=0"]
    own += ["--temp-dir=/tmp/ray-1234567"]
    address = lines[0].split("--address=")[1].split()[0]
    assert lines[0].split() == ["start", "--block", f"--address={address}", *own]
    head = ["--head", "--port=24567", "--include-dashboard=false"]
    assert lines[1].split() == ["start", "--block", *head, *own]
    assert address.endswith(":24567")
    [line] = wait_for_lines(tmp_path / "told.kvlab", 1)
    assert f"--address {address}" in line
    job = run(SCRIPTS[1], RAY_FAILS="1")
    assert job.wait(20) in (130, -signal.SIGTERM)
