"""How often a shared file is looked at or written: seldom where that is slow."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.01
"""Of the time, that looking or writing may take. A call to a file system on a network takes
milliseconds."""

LONGEST_SECONDS = 5.0


class Pace:
    """When something is due: every ``seconds``, or less often if it takes long."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._due_at, self._took = float("-inf"), 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @contextmanager
    def take_time(self) -> Iterator[None]:
        """Measure the block. The shorter of two times counts: other work may interrupt one."""
        began, before = time.monotonic(), self._took
        yield
        self._took = time.monotonic() - began
        wait = min(before, self._took) / SHARE
        self._due_at = began + max(self._seconds, min(wait, LONGEST_SECONDS))
