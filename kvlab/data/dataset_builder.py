"""Build a dataset from token pieces: select, order and split documents, and write the shards."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.data.shards import DATASET_SCHEMA
from kvlab.data.sources import get_source
from kvlab.data.token_pieces import (
    DOCUMENT_DTYPE,
    DocumentTable,
    PieceJob,
    read_document_table,
    token_dtype,
)
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.fs.atomic_files import write_json
from kvlab.humanize import format_bytes
from kvlab.spec import DataConfig

_LOCATED_DTYPE = np.dtype([*DOCUMENT_DTYPE.descr, ("piece", "<u4"), ("start", "<u8")])
_CHUNK_TOKENS = 16_000_000


def locate_documents(jobs: Sequence[PieceJob]) -> DocumentTable:
    """Return the documents of all pieces, each with its piece and its first token there."""
    tables = [np.empty(0, _LOCATED_DTYPE)]
    for index, job in enumerate(jobs):
        documents = read_document_table(job)
        table = np.empty(len(documents), _LOCATED_DTYPE)
        for column in DOCUMENT_DTYPE.names or ():
            table[column] = documents[column]
        table["piece"] = index
        table["start"] = np.cumsum(documents["tokens"], dtype=np.uint64) - documents["tokens"]
        tables.append(table)
    return np.concatenate(tables)


def select_documents(
    table: DocumentTable, *, is_shuffled: bool, max_bytes: int | None, max_tokens: int | None = None
) -> DocumentTable:
    """Return the documents to use, in order and without duplicates.

    Args:
        is_shuffled: Keep the order of ``table``; otherwise sort by hash. Either way every prefix is
            a fair mixture.
        max_bytes: Stop after the document that reaches this many bytes of text.
        max_tokens: Stop after the document that reaches this many tokens.
    """
    if not is_shuffled:
        table = table[np.argsort(table["order"], kind="stable")]
    _, first = np.unique(table["hash"], return_index=True)
    table = table[np.sort(first)]
    for column, limit in (("bytes", max_bytes), ("tokens", max_tokens)):
        if limit is not None:
            ends = np.cumsum(table[column], dtype=np.uint64)
            table = table[: np.searchsorted(ends, limit) + 1]
    return table


def describe_shortage(data: DataConfig, table: DocumentTable) -> str | None:
    """Return a message if the source has less text than the limit of ``data``; None otherwise."""
    for column, limit in (("tokens", data.max_tokens), ("bytes", data.max_bytes)):
        available = int(table[column].sum(dtype=np.uint64))
        if limit is not None and available < limit:
            text = f"data.max_{column} = {limit:,} is more than there is: the whole text has"
            return f"{text} {available:,} {column}, and all of them are taken"
    return None


def validation_mask(table: DocumentTable, fraction: float) -> npt.NDArray[np.bool_]:
    """Return which documents are held out, shape (documents,). Depends on each text alone."""
    mask: npt.NDArray[np.bool_] = table["split"] < np.uint64(int(fraction * 2**64))
    return mask


def write_dataset(
    folder: Path, data: DataConfig, identity: str, jobs: Sequence[PieceJob], table: DocumentTable
) -> None:
    """Write shards and manifest of the documents in ``table`` into an empty folder.

    Args:
        identity: `kvlab.data.dataset_identity` of ``data``.
        jobs: The jobs whose pieces hold the tokens.
        table: The selected documents, in order, from `locate_documents`.

    Raises:
        DataError: A split would be empty, or the disk is full.
    """
    is_held_out = validation_mask(table, data.validation_fraction)
    _check_counts(data, len(table), int(is_held_out.sum()))
    dtype = np.dtype(token_dtype(load_tokenizer(data.tokenizer).vocab_size))
    _check_free_space(folder, int(table["tokens"].sum(dtype=np.uint64)) * dtype.itemsize)
    documents = {"train": table[~is_held_out], "validation": table[is_held_out]}
    try:
        splits = {
            name: _write_split(folder / f"{name}.bin", part, jobs, dtype)
            for name, part in documents.items()
        }
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror})") from None
    digests = "".join(f"{name} {facts['sha256']}\n" for name, facts in splits.items())
    manifest = {
        "schema": DATASET_SCHEMA,
        "identity": identity,
        "source": data.source,
        "tokenizer": data.tokenizer,
        "vocab_size": data.vocab_size,
        "licence": data.licence or get_source(data.source).licence,
        "max_bytes": data.max_bytes,
        "max_tokens": data.max_tokens,
        "validation_fraction": data.validation_fraction,
        "dtype": dtype.str,
        "splits": splits,
        "short": describe_shortage(data, table),
        "digest": hashlib.sha256(digests.encode()).hexdigest(),
    }
    write_json(folder / "manifest.json", manifest)


def _check_counts(data: DataConfig, documents: int, held_out: int) -> None:
    if not documents:
        raise DataError(f"data.source = {data.source} has no text; name files that hold some")
    if held_out in (0, documents):
        share = "all" if held_out else "none"
        text = f"data.validation_fraction = {data.validation_fraction} holds out {share}"
        hint = "change it, or give more, smaller documents"
        raise DataError(f"{text} of the {documents} documents; {hint}")


def _check_free_space(folder: Path, required: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < required:
        text = f"{folder} has {format_bytes(free)} free, and the tokens need"
        hint = "free some, or set KVLAB_DATA to another disk"
        raise DataError(f"{text} {format_bytes(required)}; {hint}")


def _write_split(
    path: Path, table: DocumentTable, jobs: Sequence[PieceJob], dtype: "np.dtype[Any]"
) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _iter_chunks(table):
            raw = _gather_tokens(chunk, jobs, dtype).tobytes()
            digest.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return {
        "documents": len(table),
        "text_bytes": int(table["bytes"].sum(dtype=np.uint64)),
        "tokens": int(table["tokens"].sum(dtype=np.uint64)),
        "sha256": digest.hexdigest(),
    }


def _iter_chunks(table: DocumentTable) -> Iterator[DocumentTable]:
    """Yield runs of whole documents with about `_CHUNK_TOKENS` tokens."""
    ends = np.cumsum(table["tokens"], dtype=np.uint64)
    start = 0
    while start < len(table):
        offset = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, offset + _CHUNK_TOKENS)) + 1
        yield table[start:stop]
        start = stop


def _gather_tokens(
    chunk: DocumentTable, jobs: Sequence[PieceJob], dtype: "np.dtype[Any]"
) -> npt.NDArray[np.unsignedinteger]:
    """Concatenate the tokens of the documents of ``chunk``; one piece is open at a time."""
    lengths = chunk["tokens"].astype(np.int64)
    starts = chunk["start"].astype(np.int64)
    ends = np.cumsum(lengths)
    result = np.empty(int(ends[-1]), dtype)
    for piece in np.unique(chunk["piece"]):
        tokens = np.memmap(jobs[piece].tokens_path, dtype, mode="r")
        for i in np.flatnonzero(chunk["piece"] == piece):
            length, start, end = lengths[i], starts[i], ends[i]
            result[end - length : end] = tokens[start : start + length]
    return result
