"""pydantic's errors as problems with file, line, column, value, rule and way out."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from kvlab.spec.spec_model import NAME_PATTERN, NAME_RULE
from kvlab.spec.yaml_reader import Key

FieldError = tuple[tuple[Key, ...], str, bool]
"""Key path, message, and whether the key itself (not its value) is at fault."""

_MESSAGES: dict[str, str] = {
    "int_type": "is not a whole number; write one such as 12",
    "int_from_float": "is not a whole number; write one such as 12",
    "float_type": "is not a number; write one such as 0.1",
    "bool_type": "is not true or false; write one of them",
    "string_type": "is not text; put it in quotes if it is meant as text",
    "model_type": "is not a mapping; write `key: value` lines below it",
    "model_attributes_type": "is not a mapping; write `key: value` lines below it",
    "dict_type": "is not a mapping; write `key: value` lines below it",
    "list_type": "is not a list; write [a, b]",
    "tuple_type": "is not a list; write [a, b]",
    "greater_than": "is not above {gt}; use a larger number",
    "greater_than_equal": "is below {ge}; use {ge} or more",
    "less_than": "is not below {lt}; use a smaller number",
    "less_than_equal": "is above {le}; use {le} or less",
    "too_short": "has too few entries; give at least {min_length}",
    "too_long": "has too many entries; give at most {max_length}",
    "string_too_short": "is empty; write something",
}
DESIGN_PATTERN = (
    r"^(full|one_factor|leave_one_out|cumulative|pairwise|cells|fractional:(2|4|8|16|32|64))$"
)
_DESIGNS = "full, one_factor, leave_one_out, cumulative, pairwise, cells, fractional:2 (4, 8, ...)"
_PATTERN_MESSAGES = {
    DESIGN_PATTERN: f"is not one of {_DESIGNS}",
    NAME_PATTERN: f"is not a usable name; {NAME_RULE}",
    r"^(gpt2(:[1-9][0-9]{0,5})?|bytes)$": "is not a tokenizer; use gpt2, gpt2:2048 or bytes",
    r"^[GL]{1,10000}$": "may hold only G (global) and L (local); use one such as GLLLLL",
}
_MISPLACED_KEYS: dict[tuple[Key, ...], str] = {
    ("pruning",): "belongs under search; a design's cells are all trained to the end, as"
    " differences between them are paired by seed",
}
"""Keys that a person might well write at a place where they mean nothing."""


def _error_message(item: Any, context: dict[str, Any]) -> str:
    """What was expected, and the way out."""
    if item["type"] == "string_pattern_mismatch":
        return _PATTERN_MESSAGES[context["pattern"]]
    text = _MESSAGES.get(item["type"])
    return text.format(**context) if text else f"{item['msg'][:1].lower()}{item['msg'][1:]}"


def list_field_errors(error: ValidationError, root: type[BaseModel], data: Any) -> list[FieldError]:
    """Every problem in a failed validation of ``data`` against ``root``."""
    found: list[FieldError] = []
    unions: dict[tuple[Key, ...], list[str]] = {}
    for item in error.errors(include_url=False):
        path = tuple(item["loc"])
        context: dict[str, Any] = dict(item.get("ctx", {}))
        if "rules" in context:
            for name, message in context["rules"]:
                full = path + tuple(int(k) if k.isdecimal() else k for k in name.split(".") if name)
                found.append((full, f"{_format_field(full, data)} {message}", False))
            continue
        kind = item["type"]
        if path[-1:] == ("[key]",):
            message = f"{_dotted_path(path[:-2])}: {path[-2]} {_error_message(item, context)}"
            found.append((path[:-1], message, True))
            continue
        known = _existing_prefix(path, data)
        if kind == "extra_forbidden":
            found.append((path, _unknown_key_message(path, root), True))
        elif kind == "missing":
            message = f"{_dotted_path(path)} is missing; add it"
            found.append((path[:-1], message, False))
        elif known != path or kind == "literal_error":
            unions.setdefault(known, []).append(_describe_choice(kind, context))
        else:
            found.append(
                (path, f"{_format_field(path, data)} {_error_message(item, context)}", False)
            )
    for path, choices in unions.items():
        options = ", ".join(dict.fromkeys(c for c in choices if c))
        hint = _did_you_mean(_value_at(path, data), options)
        found.append((path, f"{_format_field(path, data)} is not one of {options}{hint}", False))
    return found


def _describe_choice(kind: str, context: dict[str, Any]) -> str:
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if kind == "none_required":
        return "null"
    rules = {"int_type": "a whole number", "int_from_float": "a whole number",
             "float_type": "a number", "string_type": "text",
             "greater_than_equal": f"a number of at least {context.get('ge')}",
             "less_than_equal": f"a number of at most {context.get('le')}"}  # fmt: skip
    return rules.get(kind, "")


def _existing_prefix(path: tuple[Key, ...], data: Any) -> tuple[Key, ...]:
    """The part of a pydantic location that exists in the data (unions append branch names)."""
    for depth, key in enumerate(path):
        inside = isinstance(data, dict) and key in data
        indexed = isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)
        if not inside and not indexed:
            return path[:depth]
        data = data[key]
    return path


def _value_at(path: tuple[Key, ...], data: Any) -> Any:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _dotted_path(path: tuple[Key, ...]) -> str:
    return ".".join(map(str, path))


def _format_field(path: tuple[Key, ...], data: Any) -> str:
    value = _value_at(path, data)
    if value is None and _existing_prefix(path, data) != path:
        return _dotted_path(path)
    text = format_value(value)
    return f"{_dotted_path(path)} = {text}"


def format_value(value: Any) -> str:
    """A value as YAML would write it, cut to a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value).replace("\n", " ") if not isinstance(value, dict) else "{...}"
    return text if len(text) <= 60 else text[:57] + "..."


def _did_you_mean(value: Any, options: str) -> str:
    near = get_close_matches(str(value), options.split(", "), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _unknown_key_message(path: tuple[Key, ...], root: type[BaseModel]) -> str:
    if path in _MISPLACED_KEYS:
        return f"{_dotted_path(path)} {_MISPLACED_KEYS[path]}"
    names = sorted(_field_names_at(path[:-1], root))
    near = get_close_matches(str(path[-1]), names, 1)
    way = f"did you mean {near[0]}?" if near else f"known here: {', '.join(names)}"
    return f"{_dotted_path(path)} is not a known key; {way}"


def _field_names_at(path: tuple[Key, ...], root: type[BaseModel]) -> Iterator[str]:
    model: Any = root
    for key in path:
        field = getattr(model, "model_fields", {}).get(key)
        if field is None:
            return
        kinds = [field.annotation, *get_args(field.annotation)]
        model = next((k for k in kinds if hasattr(k, "model_fields")), None)
    yield from (field.alias or name for name, field in getattr(model, "model_fields", {}).items())
    if model is not None and model.__name__ == "ModelConfig":
        yield "preset"
