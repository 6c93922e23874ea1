"""The source `files`: the user's own text, from the files and folders in `data.paths`."""

import codecs
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

from kvlab.data.data_dir import ProgressCallback, cached_sha256, file_stamp
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

_HEAD_BYTES = 65_536
"""Bytes of a file that are looked at before the whole text is read."""


@final
class LocalFiles(TextSource):
    """Files identified by their contents.

    Names, locations, order, copies and empty files do not count.
    """

    licence = "not stated; say it with data.licence"
    is_shuffled = False

    def identity(self, data: DataConfig) -> Any:
        paths, _ = _find_files(data)
        digests = cached_sha256(paths, check=partial(_check_is_text, data=data))
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
                yield {
                    "key": f"files {name} {start} {stop}",
                    "path": str(path),
                    "stamp": stamp,
                    "part": [start, stop],
                    "bytes": size,
                }

    def read(self, unit: TextUnit) -> Iterator[str]:
        path = Path(unit["path"])
        _check_unchanged(path, unit)
        start, stop = unit["part"]
        yield from read_documents(path, (start, stop))
        _check_unchanged(path, unit)


def _check_unchanged(path: Path, unit: TextUnit) -> None:
    if file_stamp(path) != unit["stamp"]:
        raise DataError(f"{path} changed while it was read; wait for its writer, run again")


def _find_files(data: DataConfig) -> tuple[list[Path], list[str]]:
    """Return all text files of ``data.paths``, sorted, and the other files in its folders."""
    files: set[Path] = set()
    ignored: list[str] = []
    for number, name in enumerate(data.paths):
        texts, others, problem = _list_texts(Path(name).expanduser())
        if problem:
            message = f"data.paths.{number} = {name} {problem}"
            raise DataError(message, field=f"data.paths.{number}")
        files.update(texts)
        ignored += others
    full = sorted({path.resolve() for path in files if _read_size(path)})
    if not full:
        names = ", ".join(data.paths)
        raise DataError(f"data.paths = {names} has only empty files; name text", field="data.paths")
    return full, ignored


def _read_size(path: Path) -> int:
    """Return the bytes of a text file.

    Raises:
        DataError: It cannot be read, such as a link that leads nowhere or to itself.
    """
    try:
        facts = path.stat()
    except OSError as error:
        text = f"{path} cannot be read ({error.strerror})"
        raise DataError(f"{text}; repair or remove it", field="data.paths") from None
    if not stat.S_ISREG(facts.st_mode):
        text = f"{path} is no regular file, and a pipe or a device may never end"
        raise DataError(f"{text}; write its text to a file", field="data.paths")
    return facts.st_size


def _list_texts(path: Path) -> tuple[list[Path], list[str], str]:
    """Return the text files at a path, the other files in its folders, and what is wrong or ''."""
    if path.is_dir():
        texts, others = [], []
        for root, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                found = Path(root, name)
                if detect_format(found) is None:
                    others.append(str(found))
                else:
                    texts.append(found)
        rule = f"is a folder without text files; it may hold {', '.join(SUFFIXES)}"
        return texts, others, "" if texts else rule
    if not path.is_file():
        if path.exists():
            return [], [], "is a pipe or a device, which may never end; write its text to a file"
        return [], [], "does not exist; name a file or a folder"
    if detect_format(path) is None:
        return [], [], f"is not one of {', '.join(SUFFIXES)}; convert it, or name another"
    return [path], [], ""


def _check_is_text(path: Path, data: DataConfig) -> None:
    """Check the beginning of a file that is said to be plain text.

    Raises:
        DataError: It is not UTF-8, or has a byte 0.
    """
    if detect_format(path) not in (".txt", ".jsonl"):
        return
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        codecs.getincrementaldecoder("utf-8")().decode(head)
        if b"\0" not in head:
            return
        rule = f"is not text: its byte {head.index(0)} is 0; name text"
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 at byte {error.start}; convert it"
    folders = [Path(name).expanduser().resolve() for name in data.paths]
    number = next(i for i, folder in enumerate(folders) if folder in (path, *path.parents))
    message = f"data.paths.{number} = {data.paths[number]}: {path.name} {rule}"
    raise DataError(message, field=f"data.paths.{number}")
