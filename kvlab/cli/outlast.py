"""Output that nobody reads any more must not end a sweep: ``kvlab submit x.yaml | head``."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO


class _Outlasting:
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
def outlasting_output() -> Iterator[None]:
    """In the block, both standard streams may break (a closed pipe, a terminal that is gone, a
    full disk under a log): what is said then is lost, and the work goes on to its exit code."""
    with redirect_stdout(_Outlasting(sys.stdout)), redirect_stderr(_Outlasting(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
