"""Paths in a YAML file stand relative to that file."""

import os
from pathlib import Path
from typing import Any


def resolve(key: str, value: Any, folder: Path) -> Any:
    """The value of a dotted key; paths in it as seen from here, if the file lies in ``folder``.

    ``data.paths`` are paths. ``training.init_from`` is one if it starts like one (``.``, ``/``
    or ``~``) or is a folder beside the file; else it is a repository and stays as it is.
    """
    if key == "data.paths" and isinstance(value, list):
        return [_joined(item, folder) if isinstance(item, str) else item for item in value]
    if key == "training.init_from" and isinstance(value, str) and value:
        path = _joined(value, folder)
        if value.startswith((".", "/", "~")) or os.path.isdir(path):
            return os.path.abspath(path)
    return value


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`resolve` for the sections of a whole experiment."""
    return {
        name: (
            {key: resolve(f"{name}.{key}", value, folder) for key, value in section.items()}
            if isinstance(section, dict)
            else section
        )
        for name, section in data.items()
    }


def _joined(path: str, folder: Path) -> str:
    return os.path.normpath(folder / Path(path).expanduser())
