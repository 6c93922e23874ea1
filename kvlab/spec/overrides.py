"""Override values of a spec by dotted key, and resolve its paths, relative to its file.

Also the `scales` of a sweep, which stand in place of keys of its file.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from kvlab.errors import SpecError
from kvlab.humanize import suggest_name
from kvlab.own_extensions import name_members
from kvlab.spec.spec_model import Problems
from kvlab.spec.yaml_reader import Key, YamlDocument, parse_yaml

if TYPE_CHECKING:
    from kvlab.spec.sweep import Sweep

_PATHS = name_members("paths")


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


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Return the keys and values of ``key=value`` as commands take them, values read as YAML.

    Raises:
        SpecError: One is not of that form, or a key is given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise SpecError(f"{text} is not key=value; write one such as model.n_kv_head=1")
        if key in found:
            raise SpecError(f"{text} sets {key} a second time; give it once")
        found[key] = parse_yaml(f"value: {value}", text).data["value"]
    return found


def resolve_path_value(key: str, value: Any, folder: Path) -> Any:
    """Return the value of a dotted key, with paths in it resolved against ``folder``.

    ``data.paths`` are paths. Extensions have others, by functions of a value and of what joins a
    path.
    ``training.init_from``, and ``data.tokenizer`` and ``model.preset`` with a slash, are one if
    they start like one (``.``, ``/`` or ``~``) or are a folder beside the file; else they are a
    repository and stay.
    """

    def join(path: str) -> str:
        return os.path.normpath(folder / Path(path).expanduser())

    if key in _PATHS:
        return resolve_name(_PATHS[key])(value, join)
    match key, value:
        case ("data.paths", list()):
            return [join(item) if isinstance(item, str) else item for item in value]
        case ("training.init_from", str()) | ("data.tokenizer" | "model.preset", str()):
            if not value or ("/" not in value and key != "training.init_from"):
                return value  # a name
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


# `scales` of a sweep: the same question at other sizes, such as a CPU's and a GPU's.
#
# scales:
#   gpu:
#     experiment: ../experiments/gpt2-124m.yaml
#     factors: {horizon: {hybrid: {model.window: 256, model.attention_pattern: GLLLLL}}}
#
# A key of a scale stands in place of the sweep's, and a level in place of the sweep's level. The
# cells are the same: a scale says what a level sets, and neither adds nor drops one.

SCALED_KEYS = (
    "experiment", "factors", *name_members("preparations"), "seeds", "search", "decide", "size",
)  # fmt: skip
"""Keys of a sweep that a scale may set. The others make the question what it is."""


def find_scale_problems(sweep: "Sweep") -> Problems:
    """Yield keys and levels of scales that the sweep does not have."""
    for name, scale in sweep.scales.items():
        at = f"scales.{name}"
        if not scale:
            yield at, f"changes nothing; write what differs, one of {', '.join(SCALED_KEYS)}"
        for key in scale:
            if key not in SCALED_KEYS:
                yield f"{at}.{key}", f"is no key of a scale; {suggest_name(key, SCALED_KEYS)}"
        for key, other in (("search", "factors"), ("factors", "search")):
            if key in scale and (key == "search") != (sweep.search is not None):
                yield f"{at}.{key}", f"cannot stand in place of the {other} of the sweep; remove it"
        factors = scale.get("factors", {})
        if not isinstance(factors, dict):
            yield f"{at}.factors", "is not a mapping; write levels by factor"
            continue
        for factor, levels in factors.items():
            key, own = f"{at}.factors.{factor}", sweep.factors.get(factor)
            if own is None:
                yield key, f"is not a factor of the sweep; use one of {', '.join(sweep.factors)}"
            elif not isinstance(levels, dict):
                yield key, "is not a mapping; write what a level changes by level"
            else:
                for level in levels.keys() - own.keys():
                    text = f"is not a level of {factor}; use one of {', '.join(own)}"
                    yield f"{key}.{level}", text


def apply_scale(sweep: "Sweep", document: YamlDocument, scale: str) -> YamlDocument:
    """Return the document of a sweep at one of its scales, named ``<sweep>-<scale>``.

    Every key keeps its location in the file, so that a problem is placed at the scale that
    causes it.
    """
    patch = document.data["scales"][scale]
    data = {key: value for key, value in document.data.items() if key != "scales"}
    data = {**data, **patch, "name": f"{sweep.name}-{scale}"}
    sources: dict[tuple[Key, ...], tuple[Key, ...]] = {
        (key,): ("scales", scale, key) for key in patch
    }
    if "factors" in patch:
        del sources[("factors",)]
        data["factors"] = {
            factor: {**levels, **patch["factors"].get(factor, {})}
            for factor, levels in document.data["factors"].items()
        }
        for factor, levels in patch["factors"].items():
            for level in levels:
                path = ("factors", factor, level)
                sources[path] = ("scales", scale, *path)
    return replace(document, data=data, moved=sources)
