"""The JSON Schema of the YAML files, by which editors complete and check them."""

from typing import Any

from kvlab.spec.experiment import Experiment
from kvlab.spec.presets import PRESETS
from kvlab.spec.sweep import Sweep

JSON_SCHEMA_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema of an ``experiment`` or a ``sweep`` file."""
    if kind == "sweep":
        schema = Sweep.model_json_schema()
        schema["title"] = "kvlab sweep"
    else:
        schema = Experiment.model_json_schema()
        schema["title"] = "kvlab experiment"
        schema["$defs"]["ModelConfig"]["properties"]["preset"] = {
            "enum": sorted(PRESETS),
            "description": "A shape by name; keys written beside it win.",
        }
    return {"$schema": JSON_SCHEMA_DRAFT, **_allow_float_notation(schema)}


def _allow_float_notation(schema: Any) -> Any:
    """Allow 10e9 for whole numbers; with `integer` alone editors would underline valid files."""
    if isinstance(schema, dict):
        opened = {key: _allow_float_notation(value) for key, value in schema.items()}
        if opened.get("type") == "integer":
            opened |= {"type": "number", "multipleOf": 1}
        return opened
    return [_allow_float_notation(item) for item in schema] if isinstance(schema, list) else schema
