"""A terminal, and what a person sees there in the end."""

import io
import re

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Terminal(io.StringIO):
    """A stream that says it is a terminal. Its size is that of COLUMNS and LINES."""

    def isatty(self) -> bool:
        return True


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
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        else:
            text = lines[row].ljust(column)
            lines[row] = text[:column] + character + text[column + 1 :]
            column += 1
    while lines and not lines[-1]:
        lines.pop()
    return lines
