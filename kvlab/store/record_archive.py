"""Read the record of one sweep from one file, which `kvlab copy` writes.

A ``.tar.xz`` with the names of a store: ``sweeps/<name>/``, ``trials/<id>/``, ``trainings/<id>/``,
``trunks/<id>/``. It holds all that a report is made from, and weights if they were asked for.
"""

import lzma
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import BinaryIO

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import MAX_JSON_BYTES, open_regular
from kvlab.store.store import Store
from kvlab.store.store_paths import POINTS_FOLDER

ARCHIVE_SUFFIX = ".tar.xz"

_MAX_EXPANSION = 1000  # records shrink 10 to 30 times
_CHUNK = 1 << 20
_MAX_DECODER_BYTES = 1 << 27  # memory of a decompressor; ours needs 9 MiB, `xz -9` 65 MiB
_ID = "[0-9a-f]{16}"
_FILE = "[a-z]+([.][a-z]+)*"
_WEIGHTS = "[A-Za-z0-9_-]+([.][A-Za-z0-9_-]+)*"
_NAME = re.compile(
    rf"(trials/{_ID}/{_FILE}|trainings/{_ID}/{_FILE}"
    rf"|trainings/{_ID}/(final|checkpoints/step-[0-9]+)/{_WEIGHTS}"
    rf"|trunks/{_ID}/step-[0-9]+/{_WEIGHTS}"
    rf"|sweeps/[A-Za-z0-9][A-Za-z0-9._-]*/({POINTS_FOLDER}/[a-z]+[0-9]*[.]json|{_FILE}))\Z"
)


def is_archive(path: str | Path) -> bool:
    """Return whether a path or a URL is named as an archive is."""
    return str(path).endswith(ARCHIVE_SUFFIX)


class _Decompressor:
    """Read what an ``.xz`` file unpacks to, which is limited, as the memory for it is.

    Args:
        most: number of bytes that it may unpack to.
    """

    def __init__(self, file: BinaryIO, most: int):
        self._file, self._left = file, most
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_DECODER_BYTES)

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes.

        Raises:
            EOFError: The file is cut off.
            ValueError: It unpacks to too much.
        """
        found = bytearray()
        while len(found) < size:
            if self._xz.eof:
                raise EOFError("it is cut off")
            found += self._decompress(size - len(found))
        return bytes(found)

    def finish(self) -> None:
        """Read what is left, which ends with a checksum of all; raises what `read` does."""
        while not self._xz.eof:
            self._decompress(_CHUNK)

    def _decompress(self, most: int) -> bytes:
        packed = self._file.read(_CHUNK) if self._xz.needs_input else b""
        if self._xz.needs_input and not packed:
            raise EOFError("it is cut off")
        data = self._xz.decompress(packed, most)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {_MAX_EXPANSION:,} times its size")
        return data


def _extract_entry(header: bytes, stream: _Decompressor, folder: Path) -> None:
    """Write the file that ``header`` describes and whose contents ``stream`` has next.

    tarfile would read any number of PAX headers and long names, each of any size, before it returns
    the entry that they belong to. So they are refused here, by the header.
    """
    entry = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    if entry.type != tarfile.REGTYPE:
        raise ValueError(f"it holds {entry.name!r}, which is no plain file")
    if not _NAME.match(entry.name):
        raise ValueError(f"it holds {entry.name!r}")
    limit = sys.maxsize if entry.name.endswith(".safetensors") else MAX_JSON_BYTES
    if not 0 <= entry.size <= limit:
        raise ValueError(f"it holds {entry.name!r} of {entry.size:,} bytes")
    target = folder / entry.name
    if target.exists():
        raise ValueError(f"it holds {entry.name} twice")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for start in range(0, entry.size, _CHUNK):
            file.write(stream.read(min(_CHUNK, entry.size - start)))
    stream.read(-entry.size % tarfile.BLOCKSIZE)


def extract_archive(path: Path, folder: Path) -> Store:
    """Return a store in ``folder``, which is empty, with the record of an archive.

    Raises:
        StoreError: The file is no archive that `write_archive` has written, or is cut off.
    """
    try:
        with open_regular(path) as packed:
            stream = _Decompressor(packed, _MAX_EXPANSION * os.fstat(packed.fileno()).st_size)
            while any(header := stream.read(tarfile.BLOCKSIZE)):  # a block of zeros ends it
                _extract_entry(header, stream, folder)
            stream.finish()
        store = Store(folder)
        if len(store.sweep_names()) != 1:
            raise ValueError(f"it describes {len(store.sweep_names())} sweeps")
        return store
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as error:
        text = f"{path} is not the record of a sweep: {error}"
        hint = f"`kvlab copy SWEEP --to FILE{ARCHIVE_SUFFIX}` writes one"
        raise StoreError(f"{text}; {hint}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
