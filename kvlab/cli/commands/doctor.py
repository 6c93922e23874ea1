"""`kvlab doctor`: what is installed and usable here, and what to do about each gap."""

import argparse
import json
from dataclasses import asdict

from kvlab.cli.health import checks
from kvlab.cli.options import add_json, add_store

_MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    found = list(checks(options.store))
    if options.json:
        print(json.dumps([asdict(check) for check in found], indent=1))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{_MARKS[check.state]}  {check.name:<{width}}  {check.found}")
            if check.way_out:
                print(f"{'':<{width + 9}}-> {check.way_out}")
    return int(any(check.state == "wrong" for check in found))
