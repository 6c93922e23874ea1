"""A sweep on a disk with a given number of free pages: ``python -m tests.faults.full_disk FOLDER``.

Runs in a mount namespace of its own (``unshare --map-root-user --mount``), so that it may put a
small tmpfs on ``FOLDER/disk``.
"""

import os
import subprocess
import sys
from pathlib import Path

from kvlab.store import Store
from tests.support.tiny_sweep import EXPERIMENT, SWEEP, run_kvlab, write_tiny_sweep

PAGE = 4096
TRAINED = EXPERIMENT.replace("tokens: 640,", "tokens: 6400, checkpoint_every: 20,")
PLAIN = SWEEP.split("factors:")[0] + "factors: {serving: {plain: {}}}\n"
BOTH = PLAIN.replace("plain: {}", 'plain: {}, tied: {serving.tie: "adjacent:2"}')


def leave_pages(disk: Path, pages: int) -> None:
    """Fill the disk but for so many pages."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    facts = os.statvfs(disk)
    assert facts.f_frsize == PAGE, "tmpfs counts in pages"
    filler.write_bytes(bytes((facts.f_bavail - pages) * PAGE))


def submit(folder: Path, store: Path, sweep: str) -> tuple[int, str]:
    """Run one `submit` in this process; return its exit code and standard error."""
    words = ["submit", folder / sweep, "--store", store, "--executor", "inline", "--no-report"]
    code, _, error = run_kvlab(*words, "--json", "--tracking-uri", "http://127.0.0.1:9")
    return code, error


def fail(folder: Path, disk: Path, sweep: str, pages: int) -> str:
    """Submit with few free pages; return the last line of the error."""
    leave_pages(disk, pages)
    code, error = submit(folder, disk / "runs", sweep)
    line = error.splitlines()[-1]
    assert code == 1, error
    assert "Traceback" not in error
    assert "/disk/runs" in line, line
    assert "No space left on device" in line, line
    assert line.endswith(("run again", "submit again", "and the disk")), line
    return line


def read_end(path: Path) -> tuple[dict[str, list[object]], list[bytes]]:
    store = Store(path)
    results = {trial: store.result(trial) for trial in store.trial_ids()}
    numbers = {
        trial: [result["status"], *(result["measurements"][k] for k in ("loss", "loss_served"))]
        for trial, result in results.items()
        if result is not None
    }
    weights = sorted(path.glob("trainings/*/final/model.safetensors"))
    return numbers, [path.read_bytes() for path in weights]


def main(folder: Path) -> None:
    os.environ["KVLAB_DATA"] = str(folder / "data")
    write_tiny_sweep(folder, PLAIN, TRAINED)
    (folder / "both.yaml").write_text(BOTH.replace("question", "name: s\nquestion"))
    assert submit(folder, folder / "calm", "both.yaml")[0] == 0
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=True)
    store = Store(disk / "runs")

    def statuses() -> list[str | None]:
        return [store.status(trial) for trial in store.trial_ids()]

    # before the first file, at the trial, in the first checkpoint, in the second
    for pages in (0, 4, 7, 24):
        line = fail(folder, disk, "s.yaml", pages)
        assert "/checkpoints/" in line or pages < 7, line
        assert statuses() in ([], [None])
    leave_pages(disk, 1000)
    assert submit(folder, store.path, "s.yaml")[0] == 0
    # the second trial has its weights and needs only pages for its record
    for pages in (2, 3, 6):
        line = fail(folder, disk, "both.yaml", pages)
        assert "result.json" in line or pages < 6, line
        assert sorted(statuses(), key=str) == [None, "done"]
    leave_pages(disk, 1000)
    assert submit(folder, store.path, "both.yaml")[0] == 0
    assert not list(store.path.rglob(".*")), "unfinished writes are left"
    numbers, weights = read_end(store.path)
    assert len(numbers) == 2
    assert (numbers, weights) == read_end(folder / "calm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
