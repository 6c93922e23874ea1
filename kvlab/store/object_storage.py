"""Copy directories of a store to any URL that fsspec opens (``s3://``, ``gs://``, a folder).

    <url>/trials/<id>/ trainings/<id>/ trunks/<id>/ sweeps/<name>/   the files of the store,
                                       copied.json   the manifest: size and sha256 of each

A directory's manifest is written after its files, and only files that it lists are read back. So
an interrupted copy is never mistaken for a whole one, and a whole one is not made again.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvlab.errors import CopyDamaged, CopyError, KvlabError, RecordDamaged, UsageError
from kvlab.fs.atomic_files import MAX_JSON_BYTES, atomic_file, file_sha256, parse_json
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import FileSeal

MANIFEST = "copied.json"
_REPLACED = "checkpoints/"

_RELATIVE_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z")


class ObjectStorage:
    """Directories of a store at a URL.

    Args:
        url: such as ``s3://bucket/kvlab``. Credentials are read as fsspec's file system does.

    Raises:
        UsageError: no file system is known or installed for the URL.

    Attributes:
        url: without its secrets, for messages.
    """

    def __init__(self, url: str):
        import fsspec

        self.url = redact_url(url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            text = f"{self.url} cannot be opened: {error}"
            raise UsageError(f"{text}; install what it names, or use another URL") from None
        self._root = self._root.rstrip("/")

    @property
    def folder(self) -> Path | None:
        """The folder, if the URL is one of this machine."""
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else ()
        return Path(self._root) if "file" in protocols else None

    def list_names(self, kind: str) -> list[str]:
        """Return the directories under ``trials``, ``trainings`` or ``sweeps``, whole or not.

        Raises:
            CopyError: the storage cannot be reached or refuses.
        """
        with self._translate_errors():
            self._fs.invalidate_cache()
            try:
                paths = self._fs.ls(f"{self._root}/{kind}", detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def upload(
        self,
        local: Path,
        remote: str,
        names: Sequence[str],
        seals: Mapping[str, FileSeal] | None = None,
    ) -> int:
        """Copy what is new in a directory and return how many files that were.

        What was copied before and is gone here stays there, apart from checkpoints that newer ones
        have replaced: it may have been damaged or collected here.

        Args:
            remote: path under the URL, such as ``trials/<id>``.
            names: files and folders in it; the one that completes it comes last.
            seals: of files that must not be copied with other contents.

        Raises:
            CopyError: the storage cannot be reached or refuses.
            RecordDamaged: a file does not have its seal.
        """
        with self._translate_errors():
            previous = self._read_manifest(remote) or {}
            manifest: dict[str, Any] = {}
            uploaded = 0
            for relative, path in _list_files(local, names):
                seal = (seals or {}).get(relative)
                try:
                    entry, is_new = self._upload_file(
                        path, f"{remote}/{relative}", previous.get(relative), seal
                    )
                except FileNotFoundError:  # a checkpoint that a newer one has replaced
                    continue
                manifest[relative] = entry
                uploaded += is_new
            replaced = {
                name for name in previous.keys() - manifest.keys() if name.startswith(_REPLACED)
            }
            kept = {name: entry for name, entry in previous.items() if name not in replaced}
            manifest = {**kept, **manifest}
            if manifest != previous:
                self._write_manifest(remote, manifest)
                for relative in replaced:
                    if self._fs.exists(f"{self._root}/{remote}/{relative}"):
                        self._fs.rm_file(f"{self._root}/{remote}/{relative}")
            return uploaded

    def download(self, remote: str, local: Path, fence: Fence | None = None) -> int | None:
        """Copy a directory back, each file atomically, in the order of its manifest.

        Files with the same contents stay; others are replaced.

        Args:
            remote: path under the URL, such as ``trials/<id>``.
            fence: of the lock on ``local``.

        Returns:
            How many files were fetched; None if there is no such copy.

        Raises:
            CopyError: the storage cannot be reached.
            CopyDamaged: a file there differs from what was copied.
            StoreError: the store cannot be written.
        """
        with self._translate_errors():
            manifest = self._read_manifest(remote)
            if not manifest:
                return None
            fetched = 0
            for relative, entry in manifest.items():
                if not _RELATIVE_PATH.match(relative):
                    text = f"{self.url}/{remote}/{MANIFEST} names {relative!r}, which is no path"
                    raise CopyDamaged(f"{text} in it; it was not written by kvlab")
                path = local / relative
                if not path.parent.resolve().is_relative_to(local.resolve()):
                    text = f"{path} lies outside of {local}, behind a symbolic link"
                    raise CopyError(f"{text}; remove the link, then copy again")
                if not (path.is_file() and file_sha256(path) == entry["sha256"]):
                    self._download_file(f"{remote}/{relative}", path, entry, fence)
                    fetched += 1
            return fetched

    def _upload_file(
        self, path: Path, remote: str, previous: Any, seal: FileSeal | None
    ) -> tuple[dict[str, Any], bool]:
        """Return the file's manifest entry, and whether it had to be copied."""
        state = path.stat()
        stamp = (state.st_size, state.st_mtime_ns)
        if previous and (previous["size"], previous["mtime_ns"]) == stamp:
            return previous, False
        entry = {
            "size": state.st_size,
            "sha256": file_sha256(path),
            "mtime_ns": state.st_mtime_ns,  # so that a large file is not read again to compare
        }
        if seal is not None and entry["sha256"] != seal["sha256"]:
            raise RecordDamaged(f"{path} is damaged, so it is not copied")
        if previous and previous["sha256"] == entry["sha256"]:
            return entry, False
        target = f"{self._root}/{remote}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)
        return entry, True

    def _download_file(
        self, remote: str, path: Path, entry: dict[str, Any], fence: Fence | None
    ) -> None:
        with atomic_file(path, fence=fence) as temporary:
            try:
                # what has another size is not fetched: it may not end, or fill the disk
                is_whole = self._read_size(remote) == entry["size"]
                if is_whole:
                    self._fs.get_file(f"{self._root}/{remote}", str(temporary))
                    is_whole = file_sha256(temporary) == entry["sha256"]
            except FileNotFoundError:
                is_whole = False
            if not is_whole:
                text = f"{self.url}/{remote} is not what was copied there"
                raise CopyDamaged(f"{text}; copy it again from a store that has it")

    def _read_size(self, remote: str) -> int | None:
        """Return the bytes of a file; None for a link, a pipe, a device or a folder."""
        facts = self._fs.info(f"{self._root}/{remote}")
        is_file = facts["type"] == "file" and not facts.get("islink")
        return int(facts["size"]) if is_file else None

    def _read_manifest(self, remote: str) -> dict[str, Any] | None:
        """Return the entries of a directory by file; None if it was never copied."""
        try:
            size = self._read_size(f"{remote}/{MANIFEST}")
            if size is None or size > MAX_JSON_BYTES:
                return {}
            manifest = parse_json(self._fs.cat_file(f"{self._root}/{remote}/{MANIFEST}"))
            files: dict[str, Any] = manifest["files"]
            for entry in files.values():
                entry["size"], entry["sha256"], entry["mtime_ns"]
            return files
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}  # cut off: the directory is copied again, and cannot be read back

    def _write_manifest(self, remote: str, files: dict[str, Any]) -> None:
        text = json.dumps({"schema": 1, "files": files}, indent=1)
        self._fs.makedirs(f"{self._root}/{remote}", exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{remote}/{MANIFEST}", text.encode())

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise CopyError for any error of the file system: each has classes of its own."""
        try:
            yield
        except KvlabError:
            raise
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            text = f"{self.url} cannot be used: {type(error).__name__}: {line}"
            raise CopyError(f"{text}; check it, then run `kvlab copy`") from None


def redact_url(url: str) -> str:
    """Return a URL without user, password and query, which may be secrets."""
    parts = urlsplit(url)
    if not parts.netloc:
        return url.partition("?")[0]
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def _list_files(directory: Path, names: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Iterate over files and their paths in ``directory``, without unfinished files."""
    for name in names:
        path = directory / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            relative = file.relative_to(directory)
            is_hidden = any(part.startswith(".") for part in relative.parts)
            if file.is_file() and not file.is_symlink() and not is_hidden:
                yield relative.as_posix(), file
