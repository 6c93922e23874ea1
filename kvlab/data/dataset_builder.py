"""Pieces to a dataset: which documents, in which order, on which side of the split."""

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
from kvlab.spec import DataConfig

_LOCATED_DTYPE = np.dtype([*DOCUMENT_DTYPE.descr, ("piece", "<u4"), ("start", "<u8")])
_CHUNK_TOKENS = 16_000_000


def locate_documents(jobs: Sequence[PieceJob]) -> DocumentTable:
    """The documents of all pieces, each with its piece and where its tokens start there."""
    tables = [np.empty(0, _LOCATED_DTYPE)]
    for number, job in enumerate(jobs):
        documents = read_document_table(job)
        table = np.empty(len(documents), _LOCATED_DTYPE)
        for column in DOCUMENT_DTYPE.names or ():
            table[column] = documents[column]
        table["piece"] = number
        table["start"] = np.cumsum(documents["tokens"], dtype=np.uint64) - documents["tokens"]
        tables.append(table)
    return np.concatenate(tables)


def select_documents(
    table: DocumentTable, *, shuffled: bool, max_bytes: int | None, max_tokens: int | None = None
) -> DocumentTable:
    """The documents to take, in order, each once.

    Taken in the given order if that is ``shuffled``, else in the order of their hash: either
    way, any beginning is a fair mixture. The document that reaches ``max_bytes``
    or ``max_tokens`` is the last.
    """
    if not shuffled:
        table = table[np.argsort(table["order"], kind="stable")]
    _, first = np.unique(table["hash"], return_index=True)
    table = table[np.sort(first)]
    for column, most in (("bytes", max_bytes), ("tokens", max_tokens)):
        if most is not None:
            ends = np.cumsum(table[column], dtype=np.uint64)
            table = table[: np.searchsorted(ends, most) + 1]
    return table


def describe_shortage(data: DataConfig, table: DocumentTable) -> str | None:
    """What ``data`` asks for and what there is, where the latter is less."""
    for column, asked in (("tokens", data.max_tokens), ("bytes", data.max_bytes)):
        there = int(table[column].sum(dtype=np.uint64))
        if asked is not None and there < asked:
            text = f"data.max_{column} = {asked:,} is more than there is: the whole text has"
            return f"{text} {there:,} {column}, and all of them are taken"
    return None


def validation_mask(table: DocumentTable, fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents are for validation: a property of each document's text alone."""
    held: npt.NDArray[np.bool_] = table["split"] < np.uint64(int(fraction * 2**64))
    return held


def write_dataset(
    folder: Path, data: DataConfig, identity: str, jobs: Sequence[PieceJob], table: DocumentTable
) -> None:
    """Writes the shards and the manifest of ``table``'s documents into an empty folder.

    Raises:
        DataError: a split would be empty, or the disk is full.
    """
    held = validation_mask(table, data.validation_fraction)
    _check_counts(data, len(table), int(held.sum()))
    dtype = np.dtype(token_dtype(load_tokenizer(data.tokenizer).vocab_size))
    _check_free_space(folder, int(table["tokens"].sum(dtype=np.uint64)) * dtype.itemsize)
    sides = {"train": table[~held], "validation": table[held]}
    try:
        splits = {
            name: _write_split(folder / f"{name}.bin", side, jobs, dtype)
            for name, side in sides.items()
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


def _check_counts(data: DataConfig, documents: int, held: int) -> None:
    if not documents:
        raise DataError(f"data.source = {data.source} has no text; name files that hold some")
    if held in (0, documents):
        side = "none" if not held else "all"
        text = f"data.validation_fraction = {data.validation_fraction} holds out {side}"
        way_out = "change it, or give more, smaller documents"
        raise DataError(f"{text} of the {documents} documents; {way_out}")


def _check_free_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        text = f"{folder} has {free / 10**9:.1f} GB free and the tokens need {wanted / 10**9:.1f}"
        raise DataError(f"{text}; free some, or set KVLAB_DATA to another disk")


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
    """Runs of whole documents with about `_CHUNK_TOKENS` tokens."""
    ends = np.cumsum(table["tokens"], dtype=np.uint64)
    start = 0
    while start < len(table):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + _CHUNK_TOKENS)) + 1
        yield table[start:stop]
        start = stop


def _gather_tokens(
    chunk: DocumentTable, jobs: Sequence[PieceJob], dtype: "np.dtype[Any]"
) -> npt.NDArray[np.unsignedinteger]:
    """The tokens of ``chunk``'s documents, one after the other; one piece is open at a time."""
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
