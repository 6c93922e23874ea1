"""Arguments that several commands share."""

import argparse
import os
import re
from pathlib import Path

from kvlab.spec import load_sweep

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        default=os.environ.get("KVLAB_STORE") or "runs",
        metavar="DIR",
        help="folder of the record (default: KVLAB_STORE, else ./runs)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def sweep_name(text: str) -> str:
    """The name of a sweep that is given by its name or by its file.

    Raises:
        SpecError: the file is not a sweep.
    """
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        return load_sweep(Path(text)).name
    return text


def memory_size(text: str) -> int:
    """Bytes of a size such as 80GB or 24GiB, for argparse."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write one such as 80GB or 24GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
