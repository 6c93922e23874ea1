"""Override values of a spec by dotted key, and resolve its paths, relative to its file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import SpecError
from kvlab.spec.yaml_reader import parse_yaml


def apply_patch(data: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``data`` with every dotted key of ``patch``, as in
    ``{"model.n_kv_head": 1}``, set."""
    result = dict(data)
    for dotted, value in patch.items():
        *sections, key = dotted.split(".")
        target = result
        for section in sections:
            inner = target.get(section)
            target[section] = dict(inner) if isinstance(inner, dict) else {}
            target = target[section]
        target[key] = value
    return result


def parse_override(text: str) -> tuple[str, Any]:
    """Return the key and value of ``key=value`` as commands take it, the value read as YAML.

    Raises:
        SpecError: there is no ``=``, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise SpecError(f"{text} is not key=value; write one such as model.n_kv_head=1")
    document = parse_yaml(f"value: {value}", text)
    return key, document.data["value"]


def resolve_path_value(key: str, value: Any, folder: Path) -> Any:
    """Return the value of a dotted key, with paths in it resolved against ``folder``.

    ``data.paths`` are paths, and so are ``definition`` in ``evaluation.lm_eval`` and ``trace`` in
    ``benchmark.conversations``.
    ``training.init_from`` is one if it starts like one (``.``, ``/`` or ``~``) or is a folder
    beside the file; else it is a repository and stays as it is.
    """
    if key == "data.paths" and isinstance(value, list):
        return [_join_path(item, folder) if isinstance(item, str) else item for item in value]
    if key == "evaluation.lm_eval" and isinstance(value, list):
        return [_resolve_inside(item, "definition", folder) for item in value]
    if key == "benchmark.conversations":
        return _resolve_inside(value, "trace", folder)
    if key == "benchmark.conversations.trace" and isinstance(value, str):
        return _join_path(value, folder)
    if key == "training.init_from" and isinstance(value, str) and value:
        path = _join_path(value, folder)
        if value.startswith((".", "/", "~")) or os.path.isdir(path):
            return os.path.abspath(path)
    return value


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Apply `resolve_path_value` to the sections of a whole experiment."""
    return {
        name: (
            {
                key: resolve_path_value(f"{name}.{key}", value, folder)
                for key, value in section.items()
            }
            if isinstance(section, dict)
            else section
        )
        for name, section in data.items()
    }


def _resolve_inside(section: Any, name: str, folder: Path) -> Any:
    """Return a mapping with the path in it that ``name`` holds resolved."""
    if isinstance(section, dict) and isinstance(section.get(name), str):
        return {**section, name: _join_path(section[name], folder)}
    return section


def _join_path(path: str, folder: Path) -> str:
    return os.path.normpath(folder / Path(path).expanduser())
