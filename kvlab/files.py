"""Files that are written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Writes ``data`` so that a reader, or a kill at any moment, sees the old file or the new.

    Raises:
        StoreError: the folder cannot be written or the disk is full; the old file stays.
    """
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        reason = f"{path} cannot be written: {error.strerror}; free or repair the disk, run again"
        raise StoreError(reason) from None


def write_json(path: str | Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically. NaN and infinity are refused."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


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
