"""Lines redrawn in place on a terminal. Only this module imports rich, which is slow to import."""

import threading
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvlab.cli.terminal import ControlText, StreamWrapper
from kvlab.humanize import sanitize_text


class LiveScreen:
    """Print lines that stay, and redraw a block of lines below them.

    The cursor is never hidden and rests on an empty line, so a process that is killed leaves the
    terminal as usable as one that ends.

    Args:
        stream: A terminal.
    """

    def __init__(self, stream: TextIO):
        terminal = cast(TextIO, _ControllingStream(stream))
        self._console = _CursorKeepingConsole(file=terminal, force_terminal=True, color_system=None)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._lock = threading.Lock()  # rich may interleave a line that stays with a redraw

    def print_line(self, line: str) -> None:
        """Print ``line`` above the block; the terminal wraps it if it is long."""
        with self._lock:
            self._console.print(Text(sanitize_text(line)), soft_wrap=True)

    def redraw(self, lines: list[str], summary: str) -> None:
        """Replace the block by ``lines`` and ``summary``, each cut to the width of the terminal.

        If the terminal is too short for the block, the last of ``lines`` are counted instead.
        """
        available = max(1, self._console.height - 3)  # the summary, the empty line, the top line
        if len(lines) > available:
            hidden = len(lines) - available + 1
            lines = [*lines[: available - 1], f"... and {hidden} more"]
        block = Text("\n").join(map(self._cut, [*lines, summary, ""]))
        with self._lock:
            self._live.start()
            self._live.update(block, refresh=True)

    def clear(self) -> None:
        """Remove the block."""
        with self._lock:
            self._live.stop()

    def _cut(self, line: str) -> Text:
        text = Text(sanitize_text(line), no_wrap=True)
        text.truncate(self._console.width - 1)  # some terminals wrap after the last column
        return text


class _ControllingStream(StreamWrapper):
    """A terminal that gets rich's control sequences, whatever is done to other text."""

    def write(self, text: str) -> int:
        return self._stream.write(ControlText(text))


class _CursorKeepingConsole(Console):
    """A console that never hides the cursor: SIGKILL leaves no time to show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        del show
        return False
