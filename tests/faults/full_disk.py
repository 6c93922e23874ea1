"""A disk with a given number of free pages: ``python -m tests.faults.full_disk FOLDER``.

Runs in a mount namespace of its own (``unshare --map-root-user --mount``), so that it may put a
small tmpfs on ``FOLDER/disk``. Prints what happened as JSON; asserts nothing.
"""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from kvlab.cli.main import main
from kvlab.store import Store
from tests.support.tiny_sweep import EXPERIMENT, SWEEP, write_tiny_sweep

PAGE = 4096
TRAINED = EXPERIMENT.replace("tokens: 640,", "tokens: 6400, checkpoint_every: 20,")
PLAIN = SWEEP.split("factors:")[0] + "factors: {serving: {plain: {}}}\n"
BOTH = PLAIN.replace("plain: {}", 'plain: {}, tied: {serving.tie: "adjacent:2"}')


class Disk:
    """A tmpfs, and a file in it that leaves as many pages as wanted."""

    def __init__(self, folder: Path):
        self.folder, self._filler = folder, folder / "filler"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=True)

    def leave(self, pages: int) -> None:
        """Makes exactly so many pages free."""
        self.empty()
        facts = os.statvfs(self.folder)
        assert facts.f_frsize == PAGE, "tmpfs counts in pages"
        self._filler.write_bytes(bytes((facts.f_bavail - pages) * PAGE))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


def submit(folder: Path, store: Path, sweep: str) -> dict[str, Any]:
    """Run one `submit` in this process; return its exit code and standard error."""
    out, error = io.StringIO(), io.StringIO()
    command = ["submit", str(folder / sweep), "--store", str(store), "--executor", "inline"]
    with redirect_stdout(out), redirect_stderr(error):
        code = main([*command, "--no-report", "--json", "--tracking-uri", "http://127.0.0.1:9"])
    return {"code": code, "error": error.getvalue()}


def states(store: Store) -> list[str | None]:
    return [store.status(trial) for trial in store.trial_ids()]


def submit_with_growing_space(
    folder: Path, disk: Disk, sweep: str, pages: list[int]
) -> list[dict[str, Any]]:
    """Submit with more and more free pages, then with enough."""
    store, found = Store(disk.folder / "runs"), []
    for count in [*pages, None]:
        if count is None:
            disk.empty()
        else:
            disk.leave(count)
        ended = submit(folder, store.path, sweep)
        found.append({"pages": count, **ended, "states": states(store)})
    return found


def list_leftovers(store: Path) -> list[str]:
    """List the files of unfinished writes."""
    return [str(p.relative_to(store)) for p in store.rglob(".*")]


def run(folder: Path) -> dict[str, Any]:
    os.environ["KVLAB_DATA"] = str(folder / "data")
    write_tiny_sweep(folder, PLAIN, TRAINED)
    (folder / "both.yaml").write_text(BOTH.replace("question", "name: s\nquestion"))
    calm = submit(folder, folder / "calm", "both.yaml")
    disk = Disk(folder / "disk")
    found = {
        "calm": calm,
        # before the first file, at the trial, in the first checkpoint, in the second
        "checkpoint": submit_with_growing_space(folder, disk, "s.yaml", [0, 4, 7, 24]),
        # the second trial has its weights and needs only pages for its record
        "record": submit_with_growing_space(folder, disk, "both.yaml", [2, 3, 6]),
        "leftovers": list_leftovers(disk.folder / "runs"),
        "weights": {},
        "numbers": {},
    }
    for name, path in (("calm", folder / "calm"), ("full", disk.folder / "runs")):
        store = Store(path)
        found["numbers"][name] = {
            trial: [result["measurements"]["loss"], result["measurements"]["loss_served"],
                    result["curves"]]
            for trial in store.trial_ids() if (result := store.result(trial))
        }  # fmt: skip
        found["weights"][name] = [
            weights.read_bytes().hex()
            for weights in sorted(path.glob("trainings/*/final/model.safetensors"))
        ]
    return found


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
