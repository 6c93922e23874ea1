"""Arguments that several commands share."""

import argparse
import os
from pathlib import Path

from kvlab.spec import load_sweep


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        default=os.environ.get("KVLAB_STORE") or "runs",
        metavar="DIR",
        help="folder of the record (default: KVLAB_STORE, else ./runs)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="ask the job server of this Ray cluster; for a store that is not to be seen from here",
    )


def sweep_name(text: str) -> str:
    """The name of a sweep that is given by its name or by its file.

    Raises:
        SpecError: the file is not a sweep.
    """
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        return load_sweep(Path(text)).name
    return text
