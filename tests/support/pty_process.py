"""A process on a terminal of its own, and what a person sees there in the end."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class PtyProcess:
    """Run ``python ARGUMENTS`` on a pseudo-terminal.

    Attributes:
        output: Everything it has written so far, with its control sequences.
    """

    def __init__(self, *arguments: object, rows: int = 24, columns: int = 100, **variables: str):
        self.output = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(1, termios.TIOCSWINSZ, size)
            # what the tests' own terminal says of its size is not true of this one
            outside = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            environment = {**outside, "TERM": "xterm", **variables}
            words = [sys.executable, *map(str, arguments)]
            os.execve(sys.executable, words, environment)

    def read_until(self, condition: Callable[[str], object]) -> None:
        """Read its output until ``condition`` holds of all of it.

        Raises:
            EOFError: If it ends first.
        """
        while not condition(self.output):
            if not self._read():
                raise EOFError(self.output)

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Read its output to the end; return its exit code, or minus the signal that killed it."""
        while self._read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # Linux says so of a terminal that no process has open
            return False
        self.output += data.decode(errors="replace")
        return bool(data)


def render_screen(output: str) -> list[str]:
    """Return the lines that ``output`` leaves on a terminal without a bottom.

    Raises:
        AssertionError: If it uses a control sequence that is not known here.
    """
    lines, row, column, position = [""], 0, 0, 0
    while position < len(output):
        match = _SEQUENCE.match(output, position)
        if match:
            position = match.end()
            argument, command = match.groups()
            if command == "A":
                row -= int(argument or 1)
                assert row >= 0, "the cursor left the screen"
            elif command == "K":
                assert argument == "2", match
                lines[row] = ""
            else:
                raise AssertionError(f"unknown control sequence {match[0]!r}")
            continue
        character = output[position]
        position += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        else:
            text = lines[row].ljust(column)
            lines[row] = text[:column] + character + text[column + 1 :]
            column += 1
    while lines and not lines[-1]:
        lines.pop()
    return lines
