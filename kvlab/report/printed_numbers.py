"""Read numbers as reports and terminals print them, and find them in text and among values."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.report.formatting import (
    MINUS,
    TIMES,
    format_binary_size,
    format_mebibytes,
    format_megabytes,
)

BYTE_UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip

_UNITS = {
    **{name.lower(): name for name in BYTE_UNITS},
    **dict.fromkeys(("byte", "bytes"), "B"),
    **dict.fromkeys(("x", TIMES, "times"), TIMES),
    **dict.fromkeys(("%", "percent"), "%"),
    **dict.fromkeys(("point", "points"), "points"),
    **{
        name: name
        for name in (
            "nats/token", "nats", "bits/byte", "ms", "s", "tokens/s", "tokens", "items", "flop/s",
        )
    },
}  # fmt: skip
"""What may stand after a number, in lower case, and the unit that it means."""

_SIGNS = f"+{MINUS}-"
_NUMBER = re.compile(
    rf"(?P<sign>[{_SIGNS}])?(?P<digits>\d[\d,]*(?:\.\d+)?)(?:[eE](?P<exponent>[{_SIGNS}]?\d+))?"
)
_UNIT = re.compile(rf"\s?(%|{TIMES}|[A-Za-z]+(?:/[A-Za-z]+)?)(?![\w/])")

_ROUNDING = 1e-9
"""Of the arithmetic on a number whose digits end where a value is rounded."""


@dataclass(frozen=True)
class PrintedNumber:
    """A number with as many digits as were printed.

    Attributes:
        text: Its digits: no commas, no plus sign, a hyphen for a minus.
        unit: Its unit, one of `BYTE_UNITS` or as in heads of tables; empty if none was printed.
        value: Its value, without the unit.
        step: Value of one in the last digit.
        digits: Number of significant digits.
    """

    text: str
    unit: str
    value: float
    step: float
    digits: int

    def is_in(self, text: str, unit: str = "") -> bool:
        """Return whether a text holds this number, in this unit or in none.

        Args:
            unit: Unit of the numbers in ``text`` that have none, such as that of a column.
        """
        return any(
            one.text == self.text and self._has_unit(one.unit or unit) for one in find_numbers(text)
        )

    def _has_unit(self, unit: str) -> bool:
        return not self.unit or not unit or read_unit(unit) == self.unit

    def is_rounded_from(self, value: float, unit: str = "") -> bool:
        """Return whether a value of a unit, rounded to these digits, is this number.

        Args:
            value: In ``unit``; bytes as a number of bytes.
        """
        return self.distance(value, unit) == 0.0

    def distance(self, value: float, unit: str = "") -> float:
        """Return by how many of its last digits a value is off; 0 if it rounds to this number.

        Infinite for a value of another unit.
        """
        known = read_unit(unit)
        if known != "B":
            return self._count_steps(value) if self._has_unit(unit) else math.inf
        if self.unit and self.unit not in BYTE_UNITS:
            return math.inf
        scales = [BYTE_UNITS[self.unit]] if self.unit else BYTE_UNITS.values()
        return min(self._count_steps(value / scale) for scale in scales)

    def _count_steps(self, value: float) -> float:
        steps = abs(value - self.value) / self.step
        slack = _ROUNDING + 4e-16 * abs(value) / self.step
        return 0.0 if steps <= 0.5 + slack else steps


def parse_number(text: str) -> PrintedNumber | None:
    """Return the number that a text is, with its unit if it has one; None if it is no number."""
    text = text.strip().removeprefix("<")  # of a p-value
    found = list(find_numbers(text))
    if len(found) != 1:
        return None
    match = _NUMBER.match(text)
    rest = text[match.end() :].strip() if match else text
    return found[0] if not rest or read_unit(rest) else None


def find_numbers(text: str) -> Iterator[PrintedNumber]:
    """Yield the numbers in a text; digits inside of words, such as ids, are none."""
    position = 0
    while match := _NUMBER.search(text, position):
        position = match.end()
        before = text[match.start() - 1 : match.start()]
        if before.isalnum() or before in ("_", "."):
            continue
        unit = _UNIT.match(text, position)
        known = read_unit(unit[1]) if unit else ""
        after = text[position : position + 1]
        if (after.isalnum() or after == "_") and not known:
            continue
        yield _make_number(match, known)


def _make_number(match: re.Match[str], unit: str) -> PrintedNumber:
    digits = match["digits"].replace(",", "")
    exponent = int((match["exponent"] or "0").replace(MINUS, "-"))
    sign = "-" if match["sign"] and match["sign"] != "+" else ""
    text = f"{sign}{digits}" + (f"e{exponent}" if match["exponent"] else "")
    decimals = len(digits.partition(".")[2])
    significant = len(digits.replace(".", "").lstrip("0"))
    step = 10.0 ** (max(-300, min(300, exponent)) - decimals)
    value = float(text) if abs(exponent) <= 300 else math.inf
    return PrintedNumber(text, unit, value, step, significant)


def read_unit(text: str) -> str:
    """Return the unit that a text means; empty if it means none that is known."""
    return _UNITS.get(text.strip().lower(), "")


def byte_texts(count: float) -> tuple[str, ...]:
    """Return how a number of bytes is printed, in reports and in the terminal."""
    texts = [
        f"{count:,.0f} B",
        format_binary_size(count),
        f"{format_megabytes(count)} MB",
        f"{format_mebibytes(count)} MiB",
    ]
    for unit in ("kB", "MB", "GB"):  # as `kvlab.humanize.format_bytes` does
        if BYTE_UNITS[unit] <= count < 1000 * BYTE_UNITS[unit]:
            texts.append(f"{count / BYTE_UNITS[unit]:.3g} {unit}")
    return tuple(texts)
