"""`kvlab schema`: print the JSON Schema with which editors complete and check YAML."""

import argparse
import json

from kvlab.benchmark.measurement import Measurement
from kvlab.spec.json_schema import JSON_SCHEMA_DRAFT, json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        choices=["experiment", "sweep", "measurement"],
        help="of an experiment or sweep file, or of a line of `kvlab bench --json`",
    )


def run(options: argparse.Namespace) -> int:
    if options.kind == "measurement":
        schema = {"$schema": JSON_SCHEMA_DRAFT, **Measurement.model_json_schema()}
    else:
        schema = json_schema(options.kind)
    print(json.dumps(schema, indent=1))
    return 0
