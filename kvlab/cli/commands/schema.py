"""`kvlab schema`: the keys of the YAML files, for editors (JSON Schema) and for people."""

import argparse
import json

from kvlab.cli.shared_arguments import add_flag
from kvlab.errors import UsageError
from kvlab.spec.key_reference import JSON_SCHEMA_DRAFT, format_key_reference, json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        nargs="?",
        choices=["experiment", "sweep", "measurement"],
        help="of an experiment or sweep file, or of a line of `kvlab bench --json`;"
        " --doc alone describes both files",
    )
    add_flag(parser, "--doc", "describe every key in Markdown: type, unit, default, an example")


def run(options: argparse.Namespace) -> int:
    """Print the schema, or with ``--doc`` the reference.

    Raises:
        UsageError: no kind is named, or one whose lines are no YAML file.
    """
    if options.doc:
        if options.kind == "measurement":
            raise UsageError("--doc describes the keys of experiment and sweep; name one, or none")
        kinds = [options.kind] if options.kind else ["experiment", "sweep"]
        print("\n".join(map(format_key_reference, kinds)), end="")
        return 0
    if options.kind is None:
        raise UsageError("name what to print: experiment, sweep or measurement; or add --doc")
    print(json.dumps(_make_schema(options.kind), indent=1))
    return 0


def _make_schema(kind: str) -> dict[str, object]:
    if kind != "measurement":
        return json_schema(kind)
    from kvlab.benchmark.measurement import Measurement

    return {"$schema": JSON_SCHEMA_DRAFT, **Measurement.model_json_schema()}
