"""Files that are written whole or not at all, and only by the process that may write them.

Writers take the `Fence` of the lock on the folder they write to, and check it right before a file
is put in place. A machine that was suspended finds out that its lock was taken over before it
overwrites what the next holder wrote.
"""

import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError
from kvlab.fs.lease import Fence

_NO_HARD_LINKS = (
    errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES
)  # fmt: skip


def replace_file(source: str | Path, target: str | Path, fence: Fence | None = None) -> None:
    """Move ``source`` to ``target`` with ``os.replace``, after a check of ``fence``.

    Raises:
        LeaseLost: The fence's lock was taken over.
    """
    if fence is not None:
        fence.check()
    os.replace(source, target)


def _link_new(source: Path, target: Path) -> None:
    """Move ``source`` to ``target``, or raise FileExistsError, in one step."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if target.exists():  # without hard links there is a moment between check and rename
            raise FileExistsError(errno.EEXIST, "File exists", str(target)) from None
        os.replace(source, target)
    else:
        os.unlink(source)


@contextmanager
def atomic_file(
    path: str | Path, *, fence: Fence | None = None, once: bool = False
) -> Iterator[Path]:
    """Yield an empty temporary file that is moved to ``path`` when the block ends without error.

    Args:
        fence: Of the lock that allows writing there; None where no lock does.
        once: Raise FileExistsError instead of replacing a file.

    Raises:
        StoreError: The folder cannot be written or the disk is full; the old file stays.
        LeaseLost: The fence's lock was taken over; the old file stays.
    """
    path = Path(path)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with explain_write_errors(path, once):
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            if fence is not None:
                fence.check()
            (_link_new if once else os.replace)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def explain_write_errors(path: str | Path, once: bool = False) -> Iterator[None]:
    """Raise StoreError for the errors of writing a file or a folder.

    Args:
        once: Leave a FileExistsError as it is.
    """
    try:
        yield
    except OSError as error:
        if once and isinstance(error, FileExistsError):
            raise
        reason = f"{path} cannot be written: {error.strerror}; free or repair the disk, run again"
        raise StoreError(reason) from None


def write_atomic(
    path: str | Path,
    data: bytes | bytearray | str,
    *,
    fence: Fence | None = None,
    once: bool = False,
) -> None:
    """Write a file so that a reader, and a kill at any moment, sees the old contents or the new.

    Args:
        fence, once: See `atomic_file`.

    Raises:
        StoreError, LeaseLost, FileExistsError: See `atomic_file`.
    """
    with atomic_file(path, fence=fence, once=once) as temporary, explain_write_errors(path):
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON; see `write_atomic`. NaN and infinity are a ValueError."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


MAX_JSON_BYTES = 1 << 28
"""Size of the largest JSON file that is read. kvlab writes none that is nearly as large."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading, but no pipe or device, which might never answer or never end.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    # not blocking: opening a pipe would wait for somebody who writes to it
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_regular(path: str | Path, max_bytes: int = -1) -> bytes:
    """Return the contents of a regular file, or its first ``max_bytes``; see `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # memory for as much as is asked for would be taken first
        return file.read(size if max_bytes < 0 else min(size, max_bytes))


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, nested too deeply, has a key twice or a number that is not
            finite, or is larger than `MAX_JSON_BYTES`.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("it has a key twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has the number {name}")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        StoreError: The file is damaged or cannot be read.
        FileNotFoundError: There is none.
    """
    try:
        return parse_json(read_regular(path, MAX_JSON_BYTES + 1))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); remove it to make it again") from None


def file_sha256(path: str | Path) -> str:
    """Return the sha256 of a file's contents, 64 hex digits.

    Raises:
        OSError: The file cannot be read.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
