"""Tables and sizes as the terminal shows them."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO


def format_table(rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Aligned columns, the first row as head; ``right`` holds an ``r`` for right-aligned ones."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    align = right.ljust(len(widths))

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=False)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), line(["-" * w for w in widths]), *map(line, rows[1:])])


def format_exact_bytes(count: int) -> str:
    """Bytes exactly, in MB (10^6) and in MiB (2^20): articles mix the two."""
    return f"{count:,} bytes = {format_decimal(count / 10**6)} MB = {format_decimal(count / 2**20)} MiB"


def format_decimal(value: float) -> str:
    """One decimal, three below 10: 1,048,576 bytes are 1.049 MB, not 1.0."""
    return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"


def format_bytes(count: int) -> str:
    """Bytes with three significant digits, in powers of 1,000."""
    return format_number(count, "B")


def format_number(count: float, unit: str = "") -> str:
    """A number with three significant digits and k, M, G, T, P or E."""
    value = float(count)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            digits = f"{value:.3g}"
            return f"{digits} {prefix}{unit}".strip() if prefix or unit else digits
        value /= 1000
    return f"{value:.3g} E{unit}"


# Output that nobody reads any more must not end a sweep: ``kvlab submit x.yaml | head``.


class _TolerantStream:
    """A stream that goes quiet for good once it cannot be written to."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._mute()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._mute()

    def _mute(self) -> None:
        """What is still in its buffer goes nowhere too, or the exit code would tell of it."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tolerate_broken_output() -> Iterator[None]:
    """In the block, both standard streams may break (a closed pipe, a terminal that is gone, a
    full disk under a log): what is said then is lost, and the work goes on to its exit code."""
    with redirect_stdout(_TolerantStream(sys.stdout)), redirect_stderr(_TolerantStream(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
