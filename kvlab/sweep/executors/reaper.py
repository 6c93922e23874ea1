"""End what a local Ray cluster leaves behind, above all if its driver is killed.

Ray's own processes notice a dead driver, but some only after a minute. The reaper is a small
process that holds a pipe to the driver. When the pipe closes, however the driver ended, it kills
every process that has a file open in the cluster's folder, where all of them log, so that no
worker goes on writing for a dead driver. Then it removes the folder. (An environment variable
would not do as a mark: Ray's processes overwrite it with their title.)

This file runs as a script, without the package, and must not import from it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time


class Reaper:
    """Watch this process from outside.

    Attributes:
        folder: Where the cluster must keep its files.
    """

    def __init__(self) -> None:
        # Ray puts sockets there, whose paths must stay under 108 bytes: no long TMPDIR.
        base = "/tmp" if os.access("/tmp", os.W_OK) else None
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="kvlab-", dir=base))
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), self.folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is for the driver alone
        )

    def close(self) -> None:
        """End what is left of the cluster now, and wait for that."""
        assert self._process.stdin is not None, "made with a pipe"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=15)


def reap(folder: str, driver: int) -> None:
    """Kill the processes that use ``folder`` until none is left: a dying one may start another."""
    import psutil

    def uses_folder(process: psutil.Process) -> bool:
        try:
            return any(file.path.startswith(folder + os.sep) for file in process.open_files())
        except (psutil.Error, OSError):  # ended, or another user's
            return False

    spared = {os.getpid(), driver}
    for _ in range(50):
        others = (process for process in psutil.process_iter() if process.pid not in spared)
        processes = list(filter(uses_folder, others))
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1], int(sys.argv[2]))
