"""The record in object storage: any place whose URL fsspec opens (``s3://``, ``gs://``, a folder).

    <url>/trials/<id>/ trainings/<id>/ sweeps/<name>/   the same files as in the store,
                                       copied.json      which of them are whole: size and sha256

A directory's ``copied.json`` is written after its files, and nothing but what it lists is ever
read back. So a copy that was cut off is no copy, and one that is there is not made again.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvlab.errors import CopyDamaged, CopyError, KvlabError, UsageError
from kvlab.fs.atomic_files import atomic_file, file_sha256
from kvlab.fs.lease import Fence

MANIFEST = "copied.json"

_RELATIVE_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z")


class ObjectStorage:
    """Directories of a store at a URL.

    Args:
        url: such as ``s3://bucket/kvlab``; credentials come as that file system wants them.

    Raises:
        UsageError: no file system is known or installed for the URL.
    """

    def __init__(self, url: str):
        import fsspec

        self.shown = redact_url(url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            text = f"{self.shown} cannot be opened: {error}"
            raise UsageError(f"{text}; install what it names, or use another URL") from None
        self._root = self._root.rstrip("/")

    @property
    def folder(self) -> Path | None:
        """Where it is, if it is a folder of this machine."""
        local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else ())
        return Path(self._root) if local else None

    def names(self, kind: str) -> list[str]:
        """What lies under ``trials``, ``trainings`` or ``sweeps``, whole or not.

        Raises:
            CopyError: the place cannot be reached or refuses.
        """
        with self._reached():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(f"{self._root}/{kind}", detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def put(self, local: Path, place: str, names: Sequence[str]) -> int:
        """Copies what is new in a directory; returns how many files that were.

        Args:
            local: the directory.
            place: of its copy under the URL, such as ``trials/<id>``.
            names: files and folders in it, the one that completes it last.

        Raises:
            CopyError: the place cannot be reached or refuses.
        """
        with self._reached():
            known = self._list(place) or {}
            listed: dict[str, Any] = {}
            written = 0
            for relative, path in _list_files(local, names):
                try:
                    facts, is_new = self._put_file(path, f"{place}/{relative}", known.get(relative))
                except FileNotFoundError:  # a checkpoint that a newer one has replaced
                    continue
                listed[relative] = facts
                written += is_new
            if listed != known:
                text = json.dumps({"schema": 1, "files": listed}, indent=1)
                self._fs.makedirs(f"{self._root}/{place}", exist_ok=True)
                self._fs.pipe_file(f"{self._root}/{place}/{MANIFEST}", text.encode())
                for relative in known.keys() - listed.keys():
                    if self._fs.exists(f"{self._root}/{place}/{relative}"):
                        self._fs.rm_file(f"{self._root}/{place}/{relative}")
            return written

    def get(self, place: str, local: Path, fence: Fence | None = None) -> int | None:
        """Brings a directory back, each file whole or not at all, in the order of its list.

        Files that are there with the same contents stay; others are replaced.

        Returns:
            How many files were fetched; None if there is no such copy.

        Raises:
            CopyError: the place cannot be reached.
            CopyDamaged: a file there is not what was copied.
            StoreError: the store cannot be written.
        """
        with self._reached():
            listed = self._list(place)
            if not listed:
                return None
            fetched = 0
            for relative, facts in listed.items():
                if not _RELATIVE_PATH.match(relative):
                    text = f"{self.shown}/{place}/{MANIFEST} names {relative!r}, which is no path in it"
                    raise CopyDamaged(f"{text}; it was not written by kvlab")
                path = local / relative
                if not (path.is_file() and file_sha256(path) == facts["sha256"]):
                    self._get_file(f"{place}/{relative}", path, facts["sha256"], fence)
                    fetched += 1
            return fetched

    def _put_file(self, path: Path, place: str, known: Any) -> tuple[dict[str, Any], bool]:
        """What is listed of a file, and whether it had to be copied."""
        state = path.stat()
        if known and (known["size"], known["mtime_ns"]) == (state.st_size, state.st_mtime_ns):
            return known, False
        facts = {
            "size": state.st_size,
            "sha256": file_sha256(path),
            "mtime_ns": state.st_mtime_ns,  # so that large files are not read again to compare
        }
        if known and known["sha256"] == facts["sha256"]:
            return facts, False
        target = f"{self._root}/{place}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)
        return facts, True

    def _get_file(self, place: str, path: Path, sha256: str, fence: Fence | None) -> None:
        with atomic_file(path, fence=fence) as temporary:
            try:
                self._fs.get_file(f"{self._root}/{place}", str(temporary))
                whole = file_sha256(temporary) == sha256
            except FileNotFoundError:
                whole = False
            if not whole:
                text = f"{self.shown}/{place} is not what was copied there"
                raise CopyDamaged(f"{text}; copy it again from a store that has it")

    def _list(self, place: str) -> dict[str, Any] | None:
        """The files of a directory that are whole there; None if it was never copied."""
        try:
            found = json.loads(self._fs.cat_file(f"{self._root}/{place}/{MANIFEST}"))
            files: dict[str, Any] = found["files"]
            for facts in files.values():
                facts["size"], facts["sha256"], facts["mtime_ns"]
            return files
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}  # cut off: what it stands for is copied again, and cannot be read back

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Every file system has errors of its own; all of them mean that it does not work now."""
        try:
            yield
        except KvlabError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            text = f"{self.shown} cannot be used: {type(error).__name__}: {first}"
            raise CopyError(f"{text}; check it, then run `kvlab copy`") from None


def redact_url(url: str) -> str:
    """A URL without user, password and query, which may be secrets."""
    parts = urlsplit(url)
    if not parts.netloc:
        return url.partition("?")[0]
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def _list_files(directory: Path, names: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Files by their paths in ``directory``, without what is half written."""
    for name in names:
        path = directory / name
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for one in inside:
            relative = one.relative_to(directory)
            hidden = any(part.startswith(".") for part in relative.parts)
            if one.is_file() and not one.is_symlink() and not hidden:
                yield relative.as_posix(), one
