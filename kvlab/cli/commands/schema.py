"""`kvlab schema`: the JSON Schema that editors complete and check YAML with."""

import argparse
import json

from kvlab.spec.schema import json_schema


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["experiment", "sweep"], help="of which kind of file")


def run(options: argparse.Namespace) -> int:
    print(json.dumps(json_schema(options.kind), indent=1))
    return 0
