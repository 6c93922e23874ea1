"""Files that prove their contents: JSON that ends with its own sha256, and lists of other files.

    {
     "schema": 1,
     "loss": 2.5,
     "sha256": "<64 hex digits: of all bytes before the comma in front of this line>"
    }

The hash finds damage and careless edits: a flipped bit, a truncated file, a number changed by
hand. It is no signature: whoever changes a file on purpose can write a new hash as well.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.atomic_files import (
    MAX_JSON_BYTES,
    explain_write_errors,
    file_sha256,
    open_regular,
    parse_json,
    read_regular,
    write_atomic,
)
from kvlab.fs.lease import Fence

_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64


class FileSeal(TypedDict):
    """Size and sha256 of a file, as a record lists them."""

    bytes: int
    sha256: str


def write_sealed_json(
    path: str | Path,
    value: Mapping[str, Any],
    *,
    fence: Fence | None = None,
    once: bool = False,
) -> None:
    """Write ``value``, which is not empty, as indented JSON that ends with its sha256.

    Args:
        fence, once: See `kvlab.fs.atomic_files.atomic_file`.

    Raises:
        ValueError: A number is NaN or infinite.
        StoreError, LeaseLost, FileExistsError: See `kvlab.fs.atomic_files.atomic_file`.
    """
    write_atomic(path, seal_json(value), fence=fence, once=once)


def seal_json(value: Mapping[str, Any]) -> bytes:
    """Return the contents of the file that `write_sealed_json` writes.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    assert value, "an object without keys has no line to end with"
    assert "sha256" not in value, "the seal is added here"
    body = json.dumps(value, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return body + f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_sealed_bytes(path: str | Path) -> bytes:
    """Return the contents of a file that `write_sealed_json` wrote, after a check of its hash.

    Raises:
        RecordDamaged: The file is not what was written.
        StoreError: The file cannot be read.
        FileNotFoundError: There is none.
    """
    try:
        data = read_regular(path, MAX_JSON_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(path):
            raise
        raise _explain(path, error) from None
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if len(data) > MAX_JSON_BYTES:
        reason = f"it is larger than {MAX_JSON_BYTES:,} bytes"
    elif seal is None:
        reason = "it does not end with its sha256: it is cut off, or of an older version of kvlab"
    elif hashlib.sha256(data[:-_SEAL_BYTES]).hexdigest().encode() != seal[1]:
        reason = "its contents do not have the sha256 at its end"
    else:
        return data
    raise RecordDamaged(f"{path} is damaged: {reason}")


def read_sealed_json(path: str | Path, *keys: str) -> dict[str, Any]:
    """Return what `write_sealed_json` wrote, without the hash.

    Nothing is parsed before the hash is checked.

    Args:
        keys: What a file of this kind has; another kind of file may lie in its place.

    Raises:
        RecordDamaged: The file is not what was written, or lacks a key.
        StoreError, FileNotFoundError: See `read_sealed_bytes`.
    """
    try:
        value: dict[str, Any] = parse_json(read_sealed_bytes(path))
        if not isinstance(value, dict) or not value.pop("sha256", None):
            raise ValueError("it is no object that ends with its sha256")
        for key in (key for key in keys if key not in value):
            raise ValueError(f"it is another file, without {key!r}")
        if not isinstance(value.get("files", {}), dict):
            raise ValueError("its files are no list by name")
    except ValueError as error:
        raise RecordDamaged(f"{path} is damaged: {error}") from None
    return value


@cache
def _make_adapter(form: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(form)


def check_form(path: str | Path, value: Any, form: Any) -> None:
    """Check the types of what was read from a file.

    A seal shows that a file is what was written, not that kvlab wrote it.

    Args:
        form: A ``TypedDict`` or a dataclass; the value may have more keys.

    Raises:
        RecordDamaged: A value is of another type, or a number that cannot be.
    """
    from pydantic import ValidationError

    adapter = _make_adapter(form)
    try:
        if is_dataclass(form):  # of which strict pydantic takes no dict
            adapter.validate_json(json.dumps(value), strict=True)
        else:
            adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200] or "it"
        text = f"{path} is damaged: {place} has a value that kvlab does not write"
        raise RecordDamaged(f"{text} ({first['msg'][0].lower()}{first['msg'][1:]})") from None


def read_seal(path: str | Path) -> str:
    """Return the sha256 at the end of a sealed file, after a check of it.

    Raises:
        RecordDamaged, StoreError, FileNotFoundError: See `read_sealed_bytes`.
    """
    return read_sealed_bytes(path)[-_SEAL_BYTES:].split(b'"')[3].decode()


def seal_bytes(data: bytes) -> FileSeal:
    """Return the seal of a file that has the contents ``data``."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def seal_file(path: str | Path) -> FileSeal:
    """Return the seal of a file.

    Raises:
        OSError: The file cannot be read.
    """
    return {"bytes": os.path.getsize(path), "sha256": file_sha256(path)}


def check_file(path: str | Path, seal: FileSeal, *, contents: bool = True) -> None:
    """Check that a file is the one that was sealed.

    Args:
        contents: Read it; otherwise only its size is compared.

    Raises:
        RecordDamaged: It is missing or has other contents.
        StoreError: It cannot be read.
    """
    if not (isinstance(seal, dict) and type(seal.get("bytes")) is int and "sha256" in seal):
        raise RecordDamaged(f"{path} is listed in another form than size and sha256")
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != seal["bytes"]:
                raise RecordDamaged(f"{path} is damaged: {size:,} bytes, not {seal['bytes']:,}")
            if not contents:
                return
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        raise RecordDamaged(f"{path} is missing") from None
    except OSError as error:
        raise _explain(path, error) from None
    if digest != seal["sha256"]:
        raise RecordDamaged(f"{path} is damaged: its contents do not have their sha256")


_NO_FILE = (errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP, errno.EISDIR, errno.ELOOP)


def _explain(path: str | Path, error: OSError) -> StoreError:
    """Return the error for a file that cannot be read: something else in its place is damage."""
    if error.errno in _NO_FILE or isinstance(error, FileNotFoundError):
        return RecordDamaged(f"{path} is damaged: it is no regular file")
    return StoreError(f"{path} cannot be read: {error.strerror}; check its permissions")


def set_aside(
    directory: Path, names: Sequence[str], fence: Fence | None = None, folder: str = "damaged"
) -> Path:
    """Move files and folders of ``directory`` into a new folder under ``folder``.

    Args:
        names: Paths in ``directory``; those that are missing are skipped.
        fence: Of the lock on ``directory``.
        folder: Name that says why they are moved.

    Returns:
        The new folder, such as ``damaged/<n>``.

    Raises:
        LeaseLost: The lock was taken over.
        StoreError: The folder cannot be written.
    """
    if fence is not None:
        fence.check()
    with explain_write_errors(directory / folder):
        for number in itertools.count(1):
            target = directory / folder / str(number)
            with contextlib.suppress(FileExistsError):
                target.mkdir(parents=True)
                break
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(directory / name, target / name)
    return target
