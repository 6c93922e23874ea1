"""How much text is done, how fast, and how long the rest takes: a line now and then."""

import time

from kvlab.data.folder import Progress

REPORT_SECONDS = 1.0


class Meter:
    """Counts the units of one pass over a text.

    Args:
        verb: what is done with them.
        total: of what `add` calls ``share``; None where it is not known how much there is.
        report: takes the lines.
    """

    def __init__(self, verb: str, total: float | None, report: Progress):
        self._verb, self._total, self._report = verb, total, report
        self._bytes = self._tokens = self._new_bytes = 0
        self._done = self._new = 0.0
        self._started = self._told = time.monotonic()

    def add(self, size: int, tokens: int, share: float, *, is_new: bool) -> None:
        """One unit more.

        Args:
            size, tokens: bytes of its text, and what they became.
            share: its part of the total.
            is_new: it was not there from an earlier, interrupted run, which says nothing
                about how fast this one is.
        """
        self._bytes += size
        self._tokens += tokens
        self._done += share
        if is_new:
            self._new_bytes += size
            self._new += share
        now = time.monotonic()
        if now - self._told >= REPORT_SECONDS:
            self._told = now
            self._report(self._line(now - self._started))

    def _line(self, seconds: float) -> str:
        line = f"{self._verb}: {self._bytes / 10**6:,.1f} MB of text"
        if self._new_bytes:
            line += f", {self._new_bytes / seconds / 10**6:.1f} MB/s"
        if self._tokens:
            line += f", {self._tokens / 10**6:,.1f} million tokens"
        if self._total is not None and self._new and self._done < self._total:
            line += f", about {_left((self._total - self._done) * seconds / self._new)} left"
        return line


def _left(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
