"""`kvlab report`: write a sweep's report again, from its record alone."""

import argparse
import json
from pathlib import Path

from kvlab.cli.options import add_json, add_store, sweep_name
from kvlab.trial import Store


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="name or file of a submitted sweep")
    add_store(parser)
    parser.add_argument(
        "--out", default="reports", metavar="DIR", help="folder of reports (default: reports)"
    )
    parser.add_argument(
        "--sections",
        metavar="A,B",
        help="sections in order (default: what the sweep asks for, else all)",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from kvlab.report import write_report

    name = sweep_name(options.sweep)
    folder = write_report(Store(options.store), name, Path(options.out))
    if options.json:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
        print(json.dumps({"sweep": name, "report": str(folder), "files": files}, indent=1))
    else:
        print(folder / "report.html")
        print(folder / "report.md")
    return 0
