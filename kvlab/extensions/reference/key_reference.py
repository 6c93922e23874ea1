"""The reference of the YAML files: every key with its type, default, unit and an example.

It is read from the specs themselves: the docstring below a field describes the key, with its unit
and an example. Editors complete and check the files by the same, as a JSON Schema.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import indent
from types import MappingProxyType
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from kvlab.humanize import format_count
from kvlab.spec.experiment import Experiment
from kvlab.spec.presets import PRESETS
from kvlab.spec.sweep import Sweep

Schema = dict[str, Any]

LONGEST_LINE = 80
"""Characters of a line of an example; what is longer is written as a block."""


@dataclass(frozen=True)
class SpecKey:
    """One key of a file.

    Attributes:
        path: dotted, as in ``model.window``. ``KEY`` stands for a name that the file chooses, and
            ``[]`` for each entry of a list.
        default: in words or as YAML; None if the key is required.
        example: YAML of a file that sets it, without the other keys that a file needs.
    """

    path: str
    description: str
    type: str
    unit: str
    default: str | None
    example: str


KeySection = tuple[str, str, list[SpecKey]]
"""The path of a section, empty for the file itself; its description in Markdown; its keys."""


def list_key_sections(kind: str) -> list[KeySection]:
    """Return the sections of an ``experiment`` or ``sweep`` file, the file itself first."""
    schema = describe_keys(kind)
    return [*_walk_section(schema, schema["$defs"])]


def format_key_reference(kind: str) -> str:
    """Return the reference of the keys of ``kind`` as Markdown."""
    sections = list_key_sections(kind)
    count = format_count(sum(len(keys) for _, _, keys in sections), "key")
    folder = f"{kind}s/*.yaml"
    lines = [f"# Keys of `{folder}`", "", f"Every file in `{folder}` may set these {count}."]
    for path, description, keys in sections:
        title = f"`{path}`" if path else f"The {kind} itself"
        lines += ["", f"## {title}", "", description]
        for key in keys:
            lines += ["", f"### `{key.path}`", "", key.description, "", f"- Type: {key.type}"]
            lines += [f"- Unit: {key.unit}"] if key.unit else []
            lines += ["- Required" if key.default is None else f"- Default: {key.default}"]
            if "\n" in key.example:
                lines += ["- Example:\n\n  ```yaml", indent(key.example, "  "), "  ```"]
            else:
                lines += [f"- Example: `{key.example}`"]
    return "\n".join(lines) + "\n"


def _walk_section(
    schema: Schema,
    definitions: Schema,
    path: str = "",
    context: Mapping[str, Any] = MappingProxyType({}),
    wrap: Callable[[Any], Any] = lambda keys: keys,
) -> Iterator[KeySection]:
    """Yield the section at ``path``, then those inside it.

    Args:
        context: keys of this section that each of its examples needs.
        wrap: puts the keys of this section where they stand in the file.
    """

    def write(name: str, value: Any) -> Any:
        given = {**context, **schema["properties"][name].get("given", {}), name: value}
        return wrap({key: value for key, value in given.items() if value is not None})

    prefix = f"{path}." if path else ""
    keys = []
    for name, field in schema["properties"].items():
        default = None if name in schema.get("required", ()) else _describe_default(field)
        example = _write_yaml(write(name, field["examples"][0]))
        kind, unit = _describe_type(field, definitions), field.get("unit", "")
        keys.append(SpecKey(f"{prefix}{name}", field["description"], kind, unit, default, example))
    paragraphs = (" ".join(part.split()) for part in schema["description"].split("\n\n"))
    yield path, "\n\n".join(paragraphs).replace("``", "`"), keys
    for name, field in schema["properties"].items():
        inner = _find_inner_section(field)
        if inner is not None:
            reference, suffix, inner_example = inner
            section = definitions[reference.rpartition("/")[2]]
            inner_context = inner_example if section.get("required") else {}

            def write_inside(keys: Any, name: str = name, suffix: str = suffix) -> Any:
                if suffix == ".KEY":
                    keys = {next(iter(schema["properties"][name]["examples"][0])): keys}
                return write(name, [keys] if suffix == "[]" else keys)

            inner_path = f"{prefix}{name}{suffix}"
            yield from _walk_section(section, definitions, inner_path, inner_context, write_inside)


def _find_inner_section(field: Schema) -> tuple[str, str, Mapping[str, Any]] | None:
    """Return the section that the value of a field is, holds by name or lists; or None.

    Returns:
        its reference, what it adds to the path of the field, and an example of its keys.
    """
    example = field["examples"][0]
    for option in field.get("anyOf", [field]):
        if "$ref" in option:
            return option["$ref"], "", example if isinstance(example, dict) else {}
        entries = _find_entry_schema(option)
        if entries is not None and "$ref" in entries:
            return entries["$ref"], ".KEY", next(iter(example.values()))
        for item in option.get("items", {}).get("anyOf", ()):
            if "$ref" in item:
                return item["$ref"], "[]", next(one for one in example if isinstance(one, dict))
    return None


def _describe_default(field: Schema) -> str:
    if "computed_default" in field:
        return str(field["computed_default"])
    default = field.get("default", {})
    if isinstance(default, dict) and "$ref" in next(iter(field.get("anyOf", [field]))):
        return "that of its keys"
    return f"`{_write_yaml(default)}`"


def _describe_type(field: Schema, definitions: Schema) -> str:
    """Return in words what a value may be."""
    if "anyOf" in field:
        options = (_describe_type(option, definitions) for option in field["anyOf"])
        return " or ".join(dict.fromkeys(options))
    if "$ref" in field:
        return "a mapping of the keys below"
    if "enum" in field or "const" in field:
        names = [f"`{value}`" for value in field.get("enum", [field.get("const")])]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    match field.get("type"):
        case "array":
            return f"list[{_describe_type(field['items'], definitions)}]"
        case "object":
            entries = _find_entry_schema(field)
            if entries is None:
                return "mapping"
            return f"mapping[name, {_describe_type(entries, definitions)}]"
        case "integer" | "number":
            return _describe_number(field)
        case ["string", "object"]:
            return "one of a user's file"
    words = {"boolean": "`true` or `false`", "string": "text", "null": "`null`"}
    return words.get(str(field.get("type")), "any value")


def _find_entry_schema(mapping: Schema) -> Schema | None:
    """Return the schema of the values of a mapping whose keys the file chooses."""
    entries = mapping.get("additionalProperties")
    if not isinstance(entries, dict):
        entries = next(iter(mapping.get("patternProperties", {}).values()), None)
    return entries


def _describe_number(field: Schema) -> str:
    kind = "whole number" if field["type"] == "integer" else "number"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above",
              "maximum": "at most", "exclusiveMaximum": "below"}  # fmt: skip
    limits = ((text, field[name]) for name, text in bounds.items() if name in field)
    words = [
        f"{text} {int(limit):,}" if float(limit).is_integer() else f"{text} {limit:g}"
        for text, limit in limits
        if abs(limit) < 10**15
    ]
    return " ".join([kind, " and ".join(words)]).strip()


def _write_yaml(value: Any) -> str:
    """Return a value as YAML: each key of a file in one line, or in several if it is long."""
    if not isinstance(value, dict) or not value:
        return _dump_yaml(value, flow=True)
    lines = []
    for key, inner in value.items():
        line = f"{key}: {_dump_yaml(inner, flow=True)}"
        lines.append(line if len(line) <= LONGEST_LINE else _dump_yaml({key: inner}, flow=None))
    return "\n".join(lines)


def _dump_yaml(value: Any, flow: bool | None) -> str:
    """Return a value as YAML in flow style; with None, its innermost collections alone."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").strip()


class _Dumper(yaml.SafeDumper):
    """Write numbers as people do: ``10e9``, not ``10000000000.0``."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    text = f"{mantissa}e{int(exponent)}" if exponent else f"{value:g}"
    # PyYAML reads 1e7 as text, so it would quote or tag it; kvlab's reader reads a number
    tag = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return dumper.represent_scalar(tag, text)


_Dumper.add_representer(float, _represent_float)


# JSON Schema

JSON_SCHEMA_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def describe_keys(kind: str) -> dict[str, Any]:
    """Return the schema of an ``experiment`` or a ``sweep`` file with what fields say beside it.

    That is ``unit``, ``computed_default`` and ``given``, see `kvlab.spec.key_reference`.
    """
    root = Sweep if kind == "sweep" else Experiment
    schema = root.model_json_schema(schema_generator=_KeepOrder) | {"title": f"kvlab {kind}"}
    if kind == "experiment":
        schema["$defs"]["ModelConfig"]["properties"]["preset"] = {
            "enum": sorted(PRESETS),
            "description": "A shape by name; keys written beside it win.",
            "computed_default": "no preset",
            "examples": ["gpt2"],
        }
    return {"$schema": JSON_SCHEMA_DRAFT, **_map_schemas(_use_standard_keywords, schema)}


class _KeepOrder(GenerateJsonSchema):
    """Keep keys in the order in which they are declared, also in examples."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:  # noqa: ARG002
        return value


def json_schema(kind: str) -> dict[str, Any]:
    """Return the standard JSON Schema of an ``experiment`` or a ``sweep`` file.

    Units and computed defaults are part of the descriptions, which editors show.
    """
    return dict(_map_schemas(_write_for_editors, describe_keys(kind)))


def _map_schemas(change: Callable[[Schema], Schema], value: Any) -> Any:
    """Return a schema with ``change`` applied to it and to every mapping inside it."""
    if isinstance(value, list):
        return [_map_schemas(change, one) for one in value]
    if not isinstance(value, dict):
        return value
    return change({key: _map_schemas(change, one) for key, one in value.items()})


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LENGTHS = {"minLength": "minItems", "maxLength": "maxItems"}


def _use_standard_keywords(schema: Schema) -> Schema:
    """Rename bounds that pydantic writes by its own names where a validator precedes them."""
    names = _BOUNDS | (_LENGTHS if schema.get("type") == "array" else {})
    standard = {names[key]: value for key, value in schema.items() if key in names}
    return standard | {key: value for key, value in schema.items() if key not in names}


def _write_for_editors(schema: Schema) -> Schema:
    """Move the unit and the computed default of a field into its description, and allow 10e9 for
    whole numbers; with `integer` alone editors would underline valid files."""
    facts = {"Default": schema.get("computed_default"), "Unit": schema.get("unit")}
    written = {k: v for k, v in schema.items() if k not in ("computed_default", "unit", "given")}
    texts = [f"{name}: {fact}." for name, fact in facts.items() if fact not in (None, "none")]
    if texts:
        written["description"] = " ".join([schema["description"], *texts])
    if schema.get("type") == "integer":
        written |= {"type": "number", "multipleOf": 1}
    return written
