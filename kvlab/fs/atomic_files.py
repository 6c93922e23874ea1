"""Files that are written whole or not at all, and only by whoever may.

A process that holds a lease on a folder guards it (`kvlab.fs.lock.Lock`). Whatever it puts in place
there, it checks right before that the lease is still its own: a machine that was suspended finds
out before it writes over what its successor wrote.
"""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError

Check = Callable[[], None]
"""Raises LeaseLost if the lease is not this process's any more."""

_guards: dict[str, Check] = {}
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


def guard(folder: str | Path, check: Check) -> None:
    """From now on, `check` is asked before this process puts anything in place in ``folder``."""
    _guards[os.path.abspath(folder)] = check


def unguard(folder: str | Path, check: Check) -> None:
    if _guards.get(os.path.abspath(folder)) is check:
        del _guards[os.path.abspath(folder)]


def guard_of(folder: str | Path) -> Check | None:
    """What guards a folder, for processes that write there on this one's behalf."""
    return _guards.get(os.path.abspath(folder))


def check_guards(path: str | Path) -> None:
    """Asks what guards ``path`` or a folder above it.

    Raises:
        LeaseLost: another process has taken over.
    """
    if _guards:
        place = os.path.abspath(path)
        for folder, check in list(_guards.items()):
            if place == folder or place.startswith(folder + os.sep):
                check()


def replace_guarded(source: str | Path, target: str | Path) -> None:
    """``os.replace``, after `check_guards` of both."""
    check_guards(source)
    check_guards(target)
    os.replace(source, target)


def _link_new(source: str | Path, target: str | Path) -> None:
    """`replace`, but FileExistsError if ``target`` is there: no moment for anybody in between."""
    check_guards(target)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.exists(target):  # a file system without hard links: nearly as good
            raise FileExistsError(errno.EEXIST, "File exists", str(target)) from None
        os.replace(source, target)
    else:
        os.unlink(source)


@contextmanager
def atomic_file(path: str | Path, *, once: bool = False) -> Iterator[Path]:
    """An empty file beside ``path``, which takes its place when the block ends without an error.

    Args:
        path: of the file.
        once: leave a file alone that is there already.

    Raises:
        StoreError: the folder cannot be written or the disk is full; the old file stays.
        LeaseLost: this process held the folder, and does not any more.
        FileExistsError: ``once``, and there is one.
    """
    path = Path(path)
    with _explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with _explain_os_errors(path, once):
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            (_link_new if once else replace_guarded)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _explain_os_errors(path: Path, once: bool = False) -> Iterator[None]:
    """Says of what the operating system refuses which file it was, and the way out."""
    try:
        yield
    except OSError as error:
        if once and isinstance(error, FileExistsError):
            raise
        reason = f"{path} cannot be written: {error.strerror}; free or repair the disk, run again"
        raise StoreError(reason) from None


def write_atomic(path: str | Path, data: bytes | bytearray | str, *, once: bool = False) -> None:
    """Writes ``data`` so that a reader, or a kill at any moment, sees the old file or the new.

    Args:
        path: of the file.
        data: all of it.
        once: leave a file alone that is there already.

    Raises:
        StoreError, LeaseLost, FileExistsError: as of `whole_file`.
    """
    with atomic_file(path, once=once) as temporary, _explain_os_errors(Path(path)):
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: str | Path, value: Any, *, once: bool = False) -> None:
    """Writes ``value`` as indented JSON; see `write_atomic`. NaN and infinity are refused."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n", once=once)


def read_json(path: str | Path) -> Any:
    """Reads one JSON file.

    Raises:
        StoreError: it is damaged or cannot be read. A missing file raises FileNotFoundError.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); remove it to make it again") from None
