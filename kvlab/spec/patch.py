"""Patches: dotted keys put over nested data, as in ``{"model.n_kv_head": 1}``."""

from collections.abc import Mapping
from typing import Any


def apply_patch(data: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` with every dotted key of ``patch`` set; ``data`` is not changed."""
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
