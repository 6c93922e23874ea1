"""The reaper ends what a driver leaves behind, and nothing else."""

import os
import subprocess
import sys

import psutil

from tests.support.driver_process import wait_for

WORKER = "import sys, time; f = open(sys.argv[1], 'w'); print('up', flush=True); time.sleep(90)"
DRIVER = f"""
import subprocess, sys
from kvlab.sweep.executors.reaper import Reaper
reaper = Reaper()
worker = subprocess.Popen(
    [sys.executable, "-c", {WORKER!r}, reaper.folder + "/log"], stdout=-1, start_new_session=True
)
worker.stdout.readline()
print(reaper.folder, worker.pid, flush=True)
sys.stdin.read()
"""


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_driver_that_is_killed_leaves_no_process_and_no_file(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", WORKER, tmp_path / "log"], stdout=-1)
    bystander.stdout.readline()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=-1, stdout=-1, text=True)
    folder, worker = driver.stdout.readline().split()
    assert os.path.exists(os.path.join(folder, "log"))
    driver.kill()
    wait_for(lambda: gone(int(worker)) and not os.path.exists(folder))
    driver.communicate()
    assert bystander.poll() is None
    bystander.kill()
    bystander.communicate()
