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

    def join(path: str) -> str:
        return os.path.normpath(folder / Path(path).expanduser())

    match key, value:
        case ("data.paths", list()):
            return [join(item) if isinstance(item, str) else item for item in value]
        case ("evaluation.lm_eval", list()):
            return [
                {**item, "definition": join(item["definition"])}
                if isinstance(item, dict) and isinstance(item.get("definition"), str)
                else item
                for item in value
            ]
        case ("benchmark.conversations", {"trace": str(trace)}):
            return {**value, "trace": join(trace)}
        case ("benchmark.conversations.trace", str()):
            return join(value)
        case ("training.init_from", str()) if value:
            path = join(value)
            is_path = value.startswith((".", "/", "~")) or os.path.isdir(path)
            return os.path.abspath(path) if is_path else value
    return value


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Apply `resolve_path_value` to the sections of a whole experiment."""
    resolved = dict(data)
    for name, section in data.items():
        if isinstance(section, dict):
            resolved[name] = {
                key: resolve_path_value(f"{name}.{key}", value, folder)
                for key, value in section.items()
            }
    return resolved
