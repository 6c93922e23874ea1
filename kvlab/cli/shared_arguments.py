"""Arguments that several commands share."""

import argparse
import os
import re
from pathlib import Path

from kvlab.errors import Problem, SpecError
from kvlab.spec import Sweep, load_sweep


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


# Numbers and sizes of memory as arguments.


_MEMORY_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def positive_int(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not 0 < int(text) < 10**15:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def memory_size(text: str) -> int:
    """Bytes, as in 80GB (10^9) or 24GiB (2^30)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write one such as 80GB or 24GiB")
    return int(float(match[1]) * _MEMORY_UNITS[match[2] or ""])


def positive_float(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


# A sweep's file, read and checked against what the packages above the specs know.


def read_sweep(path: str | Path) -> Sweep:
    """As `load_sweep`; the sections of its report exist too.

    Raises:
        SpecError: with every problem found, each with file, line and column.
    """
    sweep = load_sweep(path)
    if sweep.report.sections:
        problems = _find_unknown_sections(sweep, sweep.report.sections)
        if problems:
            raise SpecError(problems)
    return sweep


def _find_unknown_sections(sweep: Sweep, names: tuple[str, ...]) -> list[Problem]:
    from kvlab.report.sections import (  # sweeps that pick none wait not
        SECTIONS,
        explain_unknown_section,
    )

    document = sweep.source.document
    return [
        document.problem(
            ("report", "sections", number),
            f"report.sections.{number} = {name} {explain_unknown_section(name)}",
        )
        for number, name in enumerate(names)
        if name not in SECTIONS
    ]
