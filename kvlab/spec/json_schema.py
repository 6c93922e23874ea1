"""The JSON Schema of the YAML files, by which editors complete and check them."""

from collections.abc import Callable
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from kvlab.spec.experiment import Experiment
from kvlab.spec.presets import PRESETS
from kvlab.spec.sweep import Sweep

Schema = dict[str, Any]

JSON_SCHEMA_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def describe_keys(kind: str) -> dict[str, Any]:
    """Return the schema of an ``experiment`` or a ``sweep`` file with what fields say beside it.

    That is ``unit``, ``computed_default`` and ``given``, see `kvlab.spec.key_reference`.
    """
    if kind == "sweep":
        schema = Sweep.model_json_schema(schema_generator=_KeepOrder)
        schema["title"] = "kvlab sweep"
    else:
        schema = Experiment.model_json_schema(schema_generator=_KeepOrder)
        schema["title"] = "kvlab experiment"
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
    return _map_schemas(_allow_float_notation, _map_schemas(_fold_facts, describe_keys(kind)))


def _map_schemas(change: Callable[[Schema], Schema], schema: Schema) -> Schema:
    """Return a schema with ``change`` applied to it and to every schema inside it."""
    mapped = dict(schema)
    for key in ("properties", "$defs"):
        if key in schema:
            mapped[key] = {name: _map_schemas(change, one) for name, one in schema[key].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            mapped[key] = _map_schemas(change, schema[key])
    if "anyOf" in schema:
        mapped["anyOf"] = [_map_schemas(change, one) for one in schema["anyOf"]]
    return change(mapped)


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LENGTHS = {"minLength": "minItems", "maxLength": "maxItems"}


def _use_standard_keywords(schema: Schema) -> Schema:
    """Rename bounds that pydantic writes by its own names where a validator precedes them."""
    names = _BOUNDS | (_LENGTHS if schema.get("type") == "array" else {})
    standard = {names[key]: value for key, value in schema.items() if key in names}
    return standard | {key: value for key, value in schema.items() if key not in names}


def _fold_facts(schema: Schema) -> Schema:
    """Move the unit and the computed default of a field into its description."""
    facts = {"Default": schema.get("computed_default"), "Unit": schema.get("unit")}
    folded = {k: v for k, v in schema.items() if k not in ("computed_default", "unit", "given")}
    texts = [f"{name}: {fact}." for name, fact in facts.items() if fact not in (None, "none")]
    if texts:
        folded["description"] = " ".join([schema["description"], *texts])
    return folded


def _allow_float_notation(schema: Schema) -> Schema:
    """Allow 10e9 for whole numbers; with `integer` alone editors would underline valid files."""
    is_whole = schema.get("type") == "integer"
    return schema | {"type": "number", "multipleOf": 1} if is_whole else schema
