"""Convert pydantic's errors to messages: the field, its value, the rule and a hint."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from kvlab.errors import Problem, SpecError
from kvlab.humanize import suggest_name
from kvlab.own_extensions import explain_missing
from kvlab.spec.yaml_reader import Key

Path = tuple[Key, ...]


class FieldError(NamedTuple):
    """One problem of a spec.

    Attributes:
        message: the whole line, beginning with the dotted path.
        at_key: whether the key itself is at fault, not its value.
        is_rule: whether other keys could mend it, as a rule of a whole section finds it.
    """

    path: Path
    message: str
    at_key: bool = False
    is_rule: bool = False


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
    "string_too_long": "is too long; write at most {max_length} characters",
    "literal_error": "is not one of {expected}",
}

_CHOICES = {
    "none_required": "null", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "string_type": "text", "dict_type": "a mapping",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
}  # fmt: skip
"""What one branch of a union accepts, by the error of another type or value."""

_MISPLACED_KEYS: dict[Path, str] = {
    ("pruning",): "belongs under search; a design's cells are all trained to the end, as"
    " differences between them are paired by seed",
}
"""Keys that are easily written in a section that does not have them."""


def list_field_errors(error: ValidationError, root: type[BaseModel], data: Any) -> list[FieldError]:
    """Return every problem in a failed validation of ``data`` against ``root``."""
    errors: list[FieldError] = []
    choices_by_path: dict[Path, list[str]] = {}
    for item in error.errors(include_url=False):
        path, kind = tuple(item["loc"]), item["type"]
        dotted = ".".join(map(str, path))
        context: dict[str, Any] = dict(item.get("ctx", {}))
        existing, _ = _find_value(path, data)
        if kind == "default_factory_not_called":
            continue  # the field that the default follows has an error of its own
        if "rules" in context:
            for name, message in context["rules"]:  # of `raise_problems`, in the section at path
                keys = (int(key) if key.isdecimal() else key for key in name.split(".") if key)
                field = (*path, *keys)
                text = f"{_format_field(field, data)} {message}"
                errors.append(FieldError(field, text, is_rule=True))
        elif path[-1:] == ("[key]",):
            section = ".".join(map(str, path[:-2]))
            message = f"{section}: {path[-2]} {_error_message(item, context)}"
            errors.append(FieldError(path[:-1], message, at_key=True))
        elif kind == "extra_forbidden":
            names = sorted(_field_names_at(path[:-1], root))
            hint = suggest_name(path[-1], names, f"known keys: {', '.join(names)}")
            missing = explain_missing(dotted)
            text = missing or _MISPLACED_KEYS.get(path, f"is not a known key; {hint}")
            errors.append(FieldError(path, f"{dotted} {text}", at_key=True))
        elif kind == "missing":
            errors.append(FieldError(path[:-1], f"{dotted} is missing; add it"))
        elif kind == "literal_error" or (existing != path and kind != "text_rule"):
            expected = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ")
            choice = expected or _CHOICES.get(kind, "").format(**context)
            choices_by_path.setdefault(existing, []).append(choice)
        else:
            message = f"{_format_field(existing, data)} {_error_message(item, context)}"
            errors.append(FieldError(existing, message))
    for path, choices in choices_by_path.items():
        options = ", ".join(dict.fromkeys(choice for choice in choices if choice)).split(", ")
        value = _find_value(path, data)[1]
        near = suggest_name(value, options, "")
        hint = f"; {near}" if near else ""
        are_types = all(one == "text" or one.startswith("a ") for one in options)
        rule = " or ".join(options) if are_types else f"one of {', '.join(options)}"
        missing = explain_missing(".".join(key for key in path if isinstance(key, str)), value)
        text = missing or f"is not {rule}{hint}"
        errors.append(FieldError(path, f"{_format_field(path, data)} {text}"))
    return errors


def _error_message(item: Any, context: dict[str, Any]) -> str:
    """Return the rule, and what to do about it."""
    text = _MESSAGES.get(item["type"])
    return text.format(**context) if text else f"{item['msg'][:1].lower()}{item['msg'][1:]}"


def _find_value(path: Path, data: Any) -> tuple[Path, Any]:
    """Return the part of a pydantic location that is in the data, and the value there.

    Unions append the names of their branches to a location.
    """
    for depth, key in enumerate(path):
        is_key = isinstance(data, dict) and key in data
        is_index = isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)
        if not is_key and not is_index:
            return path[:depth], None
        data = data[key]
    return path, data


def raise_once(problems: Iterable[Problem]) -> None:
    """Raise the first problem of each place of a file; do nothing if there are none."""
    by_place: dict[tuple[str, int, int], Problem] = {}
    for problem in problems:
        by_place.setdefault((problem.file, problem.line, problem.column), problem)
    if by_place:
        raise SpecError(list(by_place.values()))


def _format_field(path: Path, data: Any) -> str:
    """Return ``model.n_head = 5``; without a value if the data have none."""
    existing, value = _find_value(path, data)
    dotted = ".".join(map(str, path))
    return f"{dotted} = {format_value(value)}" if existing == path else dotted


def format_value(value: Any) -> str:
    """Return a value as YAML would write it, cut to 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value).replace("\n", " ") if not isinstance(value, dict) else "{...}"
    text = f'"{text}"' if isinstance(value, str) and text.isdecimal() else text
    return text if len(text) <= 60 else text[:57] + "..."


def _field_names_at(path: Path, root: type[BaseModel]) -> Iterator[str]:
    """Yield the keys that the section at ``path`` of ``root`` may have."""
    model: Any = root
    for key in path:
        if isinstance(key, int):
            continue  # of a list, whose items all have the same keys
        field = getattr(model, "model_fields", {}).get(key)
        if field is None:
            return
        kinds = [field.annotation, *get_args(field.annotation)]
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    yield from (field.alias or name for name, field in getattr(model, "model_fields", {}).items())
    if model is not None and model.__name__ == "ModelConfig":
        yield "preset"
