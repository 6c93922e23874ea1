"""The reaper ends what a driver leaves behind, and nothing else."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.support.driver_process import wait_for

DRIVER = """
import os, subprocess, sys
from kvlab.sweep.executors.reaper import Reaper
reaper = Reaper()
child = "import sys, time; f = open(sys.argv[1], 'w'); print('up', flush=True); time.sleep(90)"
worker = subprocess.Popen(
    [sys.executable, "-c", child, reaper.folder + "/log"], stdout=-1, start_new_session=True
)
worker.stdout.readline()
print(reaper.folder, worker.pid, flush=True)
sys.stdin.read()
"""


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def bystander(tmp_path):
    code = "import sys, time; f = open(sys.argv[1], 'w'); print('up', flush=True); time.sleep(90)"
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "log"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_driver_that_is_killed_leaves_no_process_and_no_file(bystander):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=-1, stdout=-1, text=True)
    folder, worker = driver.stdout.readline().split()
    assert os.path.exists(os.path.join(folder, "log"))
    driver.kill()
    wait_for(lambda: gone(int(worker)) and not os.path.exists(folder))
    driver.communicate()
    assert bystander.poll() is None
