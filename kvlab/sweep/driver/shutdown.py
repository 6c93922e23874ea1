"""Stop a driver: by Ctrl-C or SIGTERM, or by `kvlab stop`, which asks all drivers of a sweep."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvlab.errors import Stopped
from kvlab.store import Store

SIGNALS = (signal.SIGINT, signal.SIGTERM)

POLL_SECONDS = 0.2


class StopRequest:
    """The request that one driver stop, seen by the driver and by its trials.

    A request is a file, since trials run in other processes: the sweep's stop flag, which all of
    its drivers obey, or this driver's own.
    """

    def __init__(self, store: Store, sweep: str, own_flag: Path | None):
        shared_flag = store.stop_flag(sweep)
        self._own_flag = own_flag or shared_flag
        self._flags = (shared_flag, self._own_flag)
        self.is_noticed = False

    def request(self) -> None:
        """Ask this driver and its trials to stop. Safe in a signal handler.

        Raises:
            OSError: The disk is full.
        """
        self.is_noticed = True
        with contextlib.suppress(FileNotFoundError):  # no folder yet: nothing runs yet
            self._own_flag.touch()

    def is_pending(self) -> bool:
        """Return whether one of the files is there now, whatever was noticed before."""
        return any(flag.exists() for flag in self._flags)

    def check(self) -> None:
        """Raise Stopped once the driver has been asked to stop."""
        self.is_noticed = self.is_noticed or self.is_pending()
        if self.is_noticed:
            raise Stopped("asked to stop")

    def withdraw(self) -> None:
        """Remove this driver's own file, once none of its trials runs."""
        if self._own_flag != self._flags[0]:  # the shared one is removed by the last driver
            self._own_flag.unlink(missing_ok=True)


@contextmanager
def interrupt_on_stop(flag: Path) -> Iterator[None]:
    """Interrupt the block as Ctrl-C does, once a file asks to stop.

    For work that looks for no request itself, such as a download. Only for the main thread, where
    Python handles signals; in another one the block runs to its end. The signal is SIGUSR1, since
    shells let programs in the background ignore SIGINT.

    Raises:
        Stopped: The file was there.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    is_over, is_asked = threading.Event(), threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            if flag.exists():
                is_asked.set()
                signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
                return

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (Python's signature)
        if not is_over.is_set():
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    watcher = threading.Thread(target=watch, name="kvlab-stop", daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        if not is_asked.is_set():
            raise
        raise Stopped("asked to stop") from None
    finally:
        is_over.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, previous)


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGINT or SIGTERM; raise KeyboardInterrupt at the second.

    Only for the main thread, where Python handles signals.
    """
    received = False

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (Python's signature)
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True
        stop()

    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
