"""The source `files`: the user's own text, from the files and folders in `data.paths`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from kvlab.data.data_dir import ProgressCallback
from kvlab.data.file_hashes import cached_sha256, file_stamp
from kvlab.data.text_formats import (
    SUFFIXES,
    detect_format,
    estimate_text_bytes,
    read_documents,
    split_file,
)
from kvlab.data.text_source import TextSource, TextUnit
from kvlab.errors import DataError
from kvlab.spec import DataConfig


@final
class LocalFiles(TextSource):
    """Files identified by their contents: names, locations, order and copies do not count."""

    licence = "not stated; say it with data.licence"
    is_shuffled = False

    def identity(self, data: DataConfig) -> Any:
        paths, _ = _find_files(data)
        digests = cached_sha256(paths)
        return sorted({f"{digests[path]}{detect_format(path)}" for path in paths})

    def size(self, data: DataConfig) -> int:
        """Return the bytes of all files. Copies are counted, though they are read only once."""
        return sum(path.stat().st_size for path in _find_files(data)[0])

    def text_bytes(self, data: DataConfig) -> int:
        return sum(estimate_text_bytes(path, path.stat().st_size) for path in _find_files(data)[0])

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:
        paths, ignored = _find_files(data)
        if ignored:
            suffixes = ", ".join(sorted({Path(path).suffix or "no suffix" for path in ignored}))
            progress(f"ignored {len(ignored)} files that are not text ({suffixes})")
        seen = set()
        for path, digest in cached_sha256(paths).items():
            name = f"{digest}{detect_format(path)}"
            if name in seen:
                continue
            seen.add(name)
            stamp = file_stamp(path)
            parts = split_file(path)
            size = path.stat().st_size // max(1, len(parts))
            for start, stop in parts:
                key = f"files {name} {start} {stop}"
                part = {"part": [start, stop], "bytes": size}
                yield {"key": key, "path": str(path), "stamp": stamp, **part}

    def read(self, unit: TextUnit) -> Iterator[str]:
        path = Path(unit["path"])
        start, stop = unit["part"]
        _check_unchanged(path, unit)
        yield from read_documents(path, (start, stop))
        _check_unchanged(path, unit)


def _check_unchanged(path: Path, unit: TextUnit) -> None:
    if file_stamp(path) != unit["stamp"]:
        raise DataError(f"{path} changed while it was read; wait for its writer, run again")


def _find_files(data: DataConfig) -> tuple[list[Path], list[str]]:
    """Return all text files of ``data.paths``, sorted, and the other files in its folders."""
    files: set[Path] = set()
    ignored: list[str] = []
    for name in data.paths:
        path = Path(name).expanduser()
        if path.is_dir():
            texts, others = _walk_folder(path)
            if not texts:
                text = f"data.paths = {name} is a folder without text files"
                raise DataError(f"{text}; it may hold {', '.join(SUFFIXES)}")
            files.update(texts)
            ignored += others
        elif not path.is_file():
            raise DataError(f"data.paths = {name} does not exist; name a file or a folder")
        elif detect_format(path) is None:
            raise DataError(f"data.paths = {name} is not one of {', '.join(SUFFIXES)}")
        else:
            files.add(path)
    return sorted({path.resolve() for path in files}), ignored


def _walk_folder(folder: Path) -> tuple[list[Path], list[str]]:
    texts, others = [], []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(root, name)
            if detect_format(path) is None:
                others.append(str(path))
            else:
                texts.append(path)
    return texts, others
