"""Ctrl-C and SIGTERM: the first asks the sweep to stop at its checkpoints, the second ends it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def graceful_stop(stop: Callable[[], None]) -> Iterator[None]:
    """Calls ``stop`` at the first signal of the block; the second raises KeyboardInterrupt.

    Only for the main thread, which is where Python handles signals.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (Python's signature)
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
