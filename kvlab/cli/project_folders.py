"""The folders of a project, found from any folder below it. Imports little: completion is fast."""

import os
from pathlib import Path


def find_project_root() -> Path:
    """Return the nearest folder, from this one upwards, that holds a project; else this one.

    A project has the folders ``sweeps`` and ``experiments``, or a record in ``runs``.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        record = folder / "runs"
        if all((folder / name).is_dir() for name in ("sweeps", "experiments")) or all(
            (record / name).is_dir() for name in ("sweeps", "trials")
        ):
            return folder
    return here


def project_path(name: str) -> str:
    """Return a folder of the project as seen from here: ``runs``, or ``../runs`` from below."""
    return os.path.relpath(find_project_root() / name)


def default_store() -> str:
    return os.environ.get("KVLAB_STORE") or project_path("runs")
