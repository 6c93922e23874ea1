"""What the reference of keys and measurements adds to kvlab."""

from kvlab.own_extensions import CommandPart, Parts

_METRICS = "list every measurement: unit, how it is taken, where it appears"
_SCHEMA = "describe every key of the YAML files, or print their JSON Schema"

PARTS = Parts(
    members={"schemas": {"json_schema": ".key_reference:json_schema"}},
    commands=(
        CommandPart("metrics", "init", _METRICS, ".metrics"),
        CommandPart("schema", "metrics", _SCHEMA, ".schema"),
    ),
)
