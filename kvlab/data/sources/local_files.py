"""The source `files`: the user's own text, from the files and folders in `data.paths`."""

import codecs
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

from kvlab.data import text_formats
from kvlab.data.data_dir import ProgressCallback, cached_sha256, file_stamp
from kvlab.data.sources import TextSource, TextUnit
from kvlab.data.text_formats import SUFFIXES, detect_format
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
        names = sorted({f"{digests[path]}{detect_format(path)}" for path in paths})
        # its parts were once held out by their hash
        return [*names, "end"] if text_formats.is_one_text(names) else names

    def text_bytes(self, data: DataConfig) -> int:
        files = _find_files(data)[0]
        return sum(text_formats.estimate_text_bytes(path, path.stat().st_size) for path in files)

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:
        paths, ignored = _find_files(data)
        if ignored:
            suffixes = ", ".join(sorted({path.suffix or "no suffix" for path in ignored}))
            progress(f"ignored {len(ignored)} files that are not text ({suffixes})")
        different: dict[str, Path] = {}
        for path, digest in cached_sha256(paths).items():
            different.setdefault(f"{digest}{detect_format(path)}", path)
        for name, path in different.items():
            stamp = file_stamp(path)
            for start, stop in text_formats.split_file(path):
                yield {
                    "key": f"files {name} {start} {stop}",
                    "path": str(path),
                    "stamp": stamp,
                    "part": [start, stop],
                }

    def read(self, unit: TextUnit) -> Iterator[tuple[str, str | None]]:
        path = Path(unit["path"])
        _check_unchanged(path, unit)
        try:
            for text in text_formats.read_documents(path, unit["part"]):
                yield text, None
        except DataError as error:
            error.field = "data.paths"  # so that a plan says where the file is named
            raise
        _check_unchanged(path, unit)


def _check_unchanged(path: Path, unit: TextUnit) -> None:
    if file_stamp(path) != unit["stamp"]:
        raise DataError(f"{path} changed while it was read; wait for its writer, run again")


def _refuse(data: DataConfig, number: int, rule: str) -> NoReturn:
    message = f"data.paths.{number} = {data.paths[number]}{rule}"
    raise DataError(message, field=f"data.paths.{number}")


def _find_files(data: DataConfig) -> tuple[list[Path], list[Path]]:
    """Return all text files of ``data.paths``, sorted, and the other files in its folders."""
    found: set[Path] = set()
    ignored: list[Path] = []
    for number, name in enumerate(data.paths):
        path = Path(name).expanduser()
        if path.is_dir():
            files = list(list_folder(path))
            texts = [file for file in files if detect_format(file)]
            ignored += [file for file in files if not detect_format(file)]
            if not texts:
                rule = f" is a folder without text files; it may hold {', '.join(SUFFIXES)}"
                _refuse(data, number, rule)
            found.update(texts)
        elif not path.is_file():
            state = "is a pipe or a device" if path.exists() else "does not exist"
            _refuse(data, number, f" {state}; name a file or a folder")
        elif detect_format(path) is None:
            rule = f" is not one of {', '.join(SUFFIXES)}; convert it, or name another"
            _refuse(data, number, rule)
        else:
            found.add(path)
    # links are not followed: a link's own name has the format, and its target may have no suffix
    full = sorted({path.absolute() for path in found if _read_size(path)})
    if not full:
        names = ", ".join(data.paths)
        raise DataError(f"data.paths = {names} has only empty files; name text", field="data.paths")
    return full, ignored


def list_folder(path: Path) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, without hidden files and folders."""
    for root, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _read_size(path: Path) -> int:
    """Return the bytes of a text file."""
    try:
        facts = path.stat()
    except OSError as error:
        text = f"{path} cannot be read ({error.strerror})"
        raise DataError(f"{text}; repair or remove it", field="data.paths") from None
    if not stat.S_ISREG(facts.st_mode):
        text = f"{path} is no regular file, and a pipe or a device may never end"
        raise DataError(f"{text}; write its text to a file", field="data.paths")
    return facts.st_size


def _check_is_text(path: Path, data: DataConfig) -> None:
    """Check the beginning of a file that is said to be plain text."""
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
    folders = [Path(name).expanduser().absolute() for name in data.paths]
    number = next(i for i, folder in enumerate(folders) if folder in (path, *path.parents))
    _refuse(data, number, f": {path.name} {rule}")
