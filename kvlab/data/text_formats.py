"""Read documents from files: txt, jsonl and parquet; txt and jsonl also as .gz, .xz and .zst."""

import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvlab.errors import DataError

SUFFIXES = (".txt", ".txt.gz", ".txt.xz", ".txt.zst",
            ".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")  # fmt: skip
MAX_DOCUMENT_CHARACTERS = 1_000_000
"""A txt file with more characters is split into documents at blank lines."""

MAX_LINE_BYTES = 1 << 26
"""Bytes of the longest line of jsonl: one document."""

MIN_TEXT_LIMIT = 1 << 26
MAX_EXPANSION = 200
"""A compressed file may hold so many times its size, or `MIN_TEXT_LIMIT` bytes if that is more.
Prose is compressed 3 to 10 times."""

PART_CHARACTERS = (4_000, 16_000)
UNIT_BYTES = 64_000_000
TEXT_PER_BYTE = {".gz": 2.7, ".xz": 3.5, ".zst": 3.0, ".parquet": 1.7}
"""Approximate bytes of English prose per byte on disk; 1 for uncompressed files."""


def detect_format(path: str | Path) -> str | None:
    """Return the suffix in `SUFFIXES` that ``path`` ends with, or None."""
    name = Path(path).name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def is_one_text(paths: Sequence[str | Path]) -> bool:
    """Return whether the files are one text, whose documents are at most parts of it."""
    return len(paths) == 1 and (detect_format(paths[0]) or "").startswith(".txt")


def estimate_text_bytes(path: str | Path, size: int) -> int:
    """Estimate the UTF-8 bytes of text in a file of ``size`` bytes."""
    return int(size * TEXT_PER_BYTE.get(Path(path).suffix.lower(), 1.0))


def split_file(path: Path) -> list[tuple[int, int]]:
    """Return parts [start, stop) of about `UNIT_BYTES` that can be read independently.

    They count row groups of parquet, and bytes of plain jsonl. Other files are one part, (0, -1):
    a compressed stream can only be read from its start.
    """
    kind = detect_format(path)
    if kind == ".jsonl":
        size = path.stat().st_size
        starts = range(0, size, UNIT_BYTES)
        return [(start, start + UNIT_BYTES) for start in starts]
    if kind != ".parquet":
        return [(0, -1)]
    metadata = _open_parquet(path).metadata
    parts: list[tuple[int, int]] = []
    start = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= UNIT_BYTES or group + 1 == metadata.num_row_groups:
            parts.append((start, group + 1))
            start, size = group + 1, 0
    return parts


def read_documents(path: Path, part: Sequence[int] = (0, -1)) -> Iterator[str]:
    """Yield the documents of a file, or of one part of it from `split_file`.

    A document is the ``text`` of a jsonl line or a parquet row. A txt file is one document, or
    several if it is larger than `MAX_DOCUMENT_CHARACTERS`; Windows line ends become ``\\n``.

    Raises:
        DataError: The file is missing, damaged or not of its format; the message says where.
    """
    kind = detect_format(path) or ""
    if kind == ".parquet":
        yield from _read_parquet(path, part)
    elif kind.startswith(".jsonl"):
        yield from _read_jsonl(path, part)
    else:
        try:
            text = read_decompressed(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it") from None
        yield from split_text(text.replace("\r\n", "\n"))


def read_decompressed(path: Path) -> bytes:
    """Return the bytes in a file, which its suffix says to be compressed or not."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no regular file; name one")
    with _explain_errors(path), _open_decompressed(path) as file:
        limit = _text_limit(path)
        raw = file.read(-1 if limit == math.inf else int(limit) + 1)
    _check_expansion(path, len(raw), limit)
    return raw


def split_text(text: str) -> Iterator[str]:
    """Yield ``text``, or parts of about 4,000 to 16,000 characters if it is large."""
    if len(text) <= MAX_DOCUMENT_CHARACTERS:
        yield text
        return
    shortest, longest = PART_CHARACTERS
    part: list[str] = []
    length = 0
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", text):
        for piece in _split_paragraph(paragraph, longest):
            if part and length + len(piece) > longest:
                yield "\n\n".join(part)
                part, length = [], 0
            part.append(piece)
            length += len(piece) + 2
            if length >= shortest:
                yield "\n\n".join(part)
                part, length = [], 0
    if part:
        yield "\n\n".join(part)


def _split_paragraph(paragraph: str, longest: int) -> Iterator[str]:
    """Yield parts of at most ``longest`` characters, cut at white space if possible."""
    while len(paragraph) > longest:
        cut = max(paragraph.rfind("\n", 1, longest), paragraph.rfind(" ", 1, longest))
        yield paragraph[: cut if cut > 0 else longest]
        paragraph = paragraph[cut + 1 :] if cut > 0 else paragraph[longest:]
    yield paragraph


@contextmanager
def _explain_errors(path: Path, *more: type[Exception]) -> Iterator[None]:
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError, *more)
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        text = f"{path} cannot be read ({reason}); it is missing, damaged or cut off"
        raise DataError(text) from None


def _open_decompressed(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if suffix == ".zst":
        import pyarrow  # type: ignore[import-untyped]

        # pyarrow's reader rejects a truncated stream; zstandard's takes it for the end.
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _text_limit(path: Path) -> float:
    """Return how many bytes of text a file may hold, which only a compressed one limits."""
    if path.suffix.lower() not in TEXT_PER_BYTE:
        return math.inf
    return max(MIN_TEXT_LIMIT, MAX_EXPANSION * path.stat().st_size)


def _check_expansion(path: Path, size: int, limit: float) -> None:
    if size > limit:
        text = f"{path} unpacks to more than {MAX_EXPANSION} times its size, unlike any text"
        raise DataError(f"{text}; unpack it yourself and name the file, if it is right")


def _read_jsonl(path: Path, part: Sequence[int]) -> Iterator[str]:
    start, stop = part
    position = start
    with _explain_errors(path), _open_decompressed(path) as file:
        limit = _text_limit(path)
        if start:  # a line that starts before this part belongs to the part before
            file.seek(start - 1)
            position = start - 1 + len(file.readline())
        origin = f" after byte {position}" if start else ""
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            location = f"{path}, line {number}{origin}"
            if len(line) > MAX_LINE_BYTES:
                text = f"{location}: is longer than {MAX_LINE_BYTES:,} bytes"
                raise DataError(f"{text}; split the document")
            _check_expansion(path, position + len(line), limit)
            if 0 <= stop <= position:
                return
            position += len(line)
            if line.strip():
                yield _parse_line(line, location)


def _parse_line(line: bytes, location: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: is not JSON ({error}); repair or remove it") from None
    document = record.get("text") if isinstance(record, dict) else None
    if not isinstance(document, str):
        text = f"{location}: has no field text that is a string"
        raise DataError(f"{text}; give every line one")
    return document


def _open_parquet(path: Path, dictionary: Sequence[str] = ()) -> Any:
    """Open a file; a value that many rows of a ``dictionary`` column repeat is in memory once."""
    import pyarrow
    from pyarrow import parquet

    with _explain_errors(path, pyarrow.ArrowException):
        file = parquet.ParquetFile(path, read_dictionary=dictionary)
    groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
    _check_expansion(path, sum(group.total_byte_size for group in groups), _text_limit(path))
    return file


def _read_parquet(path: Path, part: Sequence[int]) -> Iterator[str]:
    import pyarrow

    schema = _open_parquet(path).schema_arrow
    if "text" not in schema.names:
        raise DataError(f"{path}: has no column text; its columns are {', '.join(schema.names)}")
    kind = schema.field("text").type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{path}: column text is {kind}; write it as string")
    file, (start, stop) = _open_parquet(path, ["text"]), part
    groups = list(range(start, file.num_row_groups if stop < 0 else stop))
    limit, size = _text_limit(path), 0
    with _explain_errors(path, pyarrow.ArrowException):
        for batch in file.iter_batches(1024, row_groups=groups, columns=["text"]):
            for text in map(methodcaller("as_py"), batch.column(0)):
                if text is not None:
                    size += len(text)
                    _check_expansion(path, size, limit)
                    yield text
