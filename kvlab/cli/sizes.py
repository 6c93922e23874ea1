"""Numbers and sizes of memory as arguments."""

import argparse
import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not 0 < int(text) < 10**15:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def memory_size(text: str) -> int:
    """Bytes, as in 80GB (10^9) or 24GiB (2^30)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write one such as 80GB or 24GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
