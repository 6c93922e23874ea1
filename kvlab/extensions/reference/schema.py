"""`kvlab schema`: the keys of the YAML files, for editors (JSON Schema) and for people."""

import argparse
import json

from kvlab.benchmark.measurement import Measurement
from kvlab.cli.shared_arguments import add_flag
from kvlab.errors import UsageError
from kvlab.extensions.reference import key_reference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ["experiment", "sweep", "measurement"]
    text = "of an experiment or sweep file, or of a line of `kvlab bench --json`"
    parser.add_argument("kind", nargs="?", choices=kinds, help=text)
    add_flag(parser, "--doc", "describe every key in Markdown: type, unit, default, an example")


def run(options: argparse.Namespace) -> None:
    """Print the schema, or with ``--doc`` the reference.

    Raises:
        UsageError: no kind is named, or one whose lines are no YAML file.
    """
    kind = options.kind
    if options.doc:
        if kind == "measurement":
            raise UsageError("--doc describes the keys of experiment and sweep; name one, or none")
        kinds = [kind] if kind else ["experiment", "sweep"]
        print("\n".join(map(key_reference.format_key_reference, kinds)), end="")
    elif kind is None:
        raise UsageError("name what to print: experiment, sweep or measurement; or add --doc")
    elif kind == "measurement":
        schema = {"$schema": key_reference.JSON_SCHEMA_DRAFT, **Measurement.model_json_schema()}
        print(json.dumps(schema, indent=1))
    else:
        print(json.dumps(key_reference.json_schema(kind), indent=1))
