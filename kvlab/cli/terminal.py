"""Text output of the commands: aligned tables, streams that may break."""

import argparse
import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from kvlab.humanize import sanitize_line, sanitize_text


def format_table(rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Align columns, the same in a terminal and in a pipe.

    Args:
        rows: The head, then the body; all of equal length.
        right: An ``r`` at the position of every column that is aligned to the right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = right.ljust(len(widths))

    def format_row(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=False)
        ]
        return "  ".join(cells).rstrip()

    head, *body = rows
    return "\n".join(map(format_row, [head, ["-" * width for width in widths], *body]))


def print_result(options: argparse.Namespace, facts: Any, text: str) -> None:
    """Print ``facts`` with ``--json``, else ``text``."""
    print(json.dumps(facts, indent=1) if options.json else text)


def print_answer(answer: str, report: Path, stream: TextIO) -> None:
    """Print what was found, wrapped at the terminal's width, and where the report is.

    Args:
        answer: See `kvlab.report.answer_text`.
        report: The report's folder.
        stream: Where to.
    """
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
    )
    for line in answer.splitlines():
        wrapper.subsequent_indent = "  " if line.startswith("- ") else ""
        print(wrapper.fill(line), file=stream)
    print(report / "report.html", file=stream)


class ControlText(str):
    """Text of kvlab's own that moves the cursor, which `sanitize_output` leaves as it is."""

    __slots__ = ()


@contextmanager
def sanitize_output() -> Iterator[None]:
    """Replace control characters and direction marks in all output of the block by escapes.

    Names, messages and logs of a record come from others. A terminal would obey what is in them.
    """
    with redirect_stdout(_CleanStream(sys.stdout)), redirect_stderr(_CleanStream(sys.stderr)):
        yield


class StreamWrapper:
    """A stream that does as another one, but for what a subclass defines."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _CleanStream(StreamWrapper):
    """A stream that writes `kvlab.humanize.sanitize_text` of what it gets."""

    def write(self, text: str) -> int:
        self._stream.write(text if isinstance(text, ControlText) else sanitize_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def show_status_line(line: str) -> None:
    """Replace the line of the terminal at standard error by ``line``, as far as it fits."""
    width = max(20, shutil.get_terminal_size().columns - 1)
    sys.stderr.write(ControlText(f"\r\x1b[K{sanitize_line(line)[:width]}\r"))
    sys.stderr.flush()


class LiveScreen:
    """Print lines that stay, and redraw a block of lines below them.

    The cursor is never hidden and rests on an empty line, so a process that is killed leaves the
    terminal as usable as one that ends. Lines may go to any stream; only a terminal is redrawn.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._lock = stream, threading.Lock()
        self._block: list[str] = []

    def print_line(self, line: str) -> None:
        """Print ``line`` above the block; the terminal wraps it if it is long."""
        self._write([sanitize_text(line)], self._block)

    def redraw(self, lines: list[str], summary: str) -> None:
        """Replace the block by ``lines`` and ``summary``, each cut to the width of the terminal.

        If the terminal is too short for the block, the last of ``lines`` are counted instead.
        """
        columns, rows = shutil.get_terminal_size()
        available = max(1, rows - 3)  # the summary, the empty line, the top line
        if len(lines) > available:
            hidden = len(lines) - available + 1
            lines = [*lines[: available - 1], f"... and {hidden} more"]
        shown = (" ".join(sanitize_text(line).splitlines()) for line in [*lines, summary])
        self._write([], [line[: columns - 1] for line in shown])  # some wrap after the last column

    def clear(self) -> None:
        """Remove the block."""
        self._write([], [])

    def _write(self, lines: list[str], block: list[str]) -> None:
        with self._lock:
            erase = "\r\x1b[A\x1b[2K" * len(self._block)
            self._block = block
            text = "".join(f"{line}\n" for line in [*lines, *block])
            self._stream.write(ControlText(erase + text))
            self._stream.flush()


@contextmanager
def tolerate_broken_output() -> Iterator[None]:
    """Ignore that standard output or error cannot be written to any more during the block.

    A closed pipe (``kvlab submit x.yaml | head``), a terminal that is gone or a full disk under a
    log must not end a sweep. Its output is lost; its exit code stays.
    """
    with redirect_stdout(_TolerantStream(sys.stdout)), redirect_stderr(_TolerantStream(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


class _TolerantStream(StreamWrapper):
    """A stream that discards all output after the first error."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard_output(self._stream)


def discard_output(stream: TextIO) -> None:
    """Send the output of ``stream`` nowhere from now on, with what is still in its buffer.

    Python would otherwise fail to flush the buffer at exit, and change the exit code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
