"""Build a dataset from token pieces: select, order and split documents, and write the shards."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.data import deduplication, token_pieces
from kvlab.data.shards import DATASET_SCHEMA
from kvlab.data.sources import get_source
from kvlab.data.text_formats import is_one_text
from kvlab.data.token_pieces import DOCUMENT_DTYPE, DocumentTable, PieceJob
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.humanize import format_count
from kvlab.spec import DataConfig

_LOCATED_DTYPE = np.dtype([*DOCUMENT_DTYPE.descr, ("piece", "<u4"), ("start", "<u8")])
_CHUNK_TOKENS = 16_000_000
_SCAN_TOKENS = 100_000
_FEWEST_GROUPS = 4
_MANIFEST_SETTINGS = ("vocab_size", "max_bytes", "max_tokens", "validation_fraction")
_BOUNDARIES = [
    re.compile(pattern) for pattern in (rb"\n[ \t]*\n+", rb"\n", rb"[ \t]+", rb"(?=[^\x80-\xbf])")
]
"""Where a document may be split, the best first: paragraphs, lines, words, characters."""


def locate_documents(jobs: Sequence[PieceJob]) -> DocumentTable:
    """Return the documents of all pieces, each with its piece and its first token there."""
    tables = [np.empty(0, _LOCATED_DTYPE)]
    for index, job in enumerate(jobs):
        documents = token_pieces.read_document_table(job)
        table = np.empty(len(documents), _LOCATED_DTYPE)
        table[list(DOCUMENT_DTYPE.names or ())] = documents
        table["piece"] = index
        table["start"] = np.cumsum(documents["tokens"], dtype=np.uint64) - documents["tokens"]
        tables.append(table)
    return np.concatenate(tables)


def select_documents(
    table: DocumentTable, *, is_shuffled: bool, max_bytes: int | None, max_tokens: int | None = None
) -> tuple[DocumentTable, int]:
    """Return the documents to use, in order, and how many copies and near-duplicates of these were
    left out.

    Args:
        is_shuffled: Keep the order of ``table``; otherwise sort by hash. Either way every prefix is
            a fair mixture.
    """
    if not is_shuffled:
        table = table[np.argsort(table["order"], kind="stable")]
    kept = np.flatnonzero(deduplication.find_first_of_kind(table["hash"], table["bands"]))
    for column, limit in (("bytes", max_bytes), ("tokens", max_tokens)):
        if limit is not None:
            ends = np.cumsum(table[column][kept], dtype=np.uint64)
            kept = kept[: np.searchsorted(ends, limit) + 1]
    considered = int(kept[-1]) + 1 if len(kept) else 0
    return table[kept], considered - len(kept)


def validation_mask(
    table: DocumentTable, fraction: float, *, is_grouped: bool = False
) -> npt.NDArray[np.bool_]:
    """Return which documents are held out, shape (documents,).

    Without groups this depends on each text alone, so a document that is held out remains so when
    text is added. Groups differ so much in size that chance would decide the size of the split.
    They are held out in the order of their hash until they have ``fraction`` of the text; those
    with over a quarter of that are training text, unless all have more.
    """
    if not is_grouped:
        mask: npt.NDArray[np.bool_] = table["split"] < np.uint64(int(fraction * 2**64))
        return mask
    _, groups = np.unique(table["split"], return_inverse=True)
    sizes = np.bincount(groups, weights=table["bytes"])
    target = fraction * sizes.sum()
    is_small = sizes <= max(target / _FEWEST_GROUPS, sizes.min())
    ends = np.cumsum(np.where(is_small, sizes, 0))
    return np.asarray((is_small & (ends - sizes < target))[groups])


def split_document(
    table: DocumentTable, jobs: Sequence[PieceJob], fraction: float
) -> tuple[DocumentTable, int] | None:
    """Split a text that is one document: hold out its end, and leave out what is between.

    Training text ends and held-out text begins at blank lines, else at ends of lines, at white
    space or at characters: the first of these that has a place on either side near enough to the
    cut. What is between them, such as the paragraph that the cut is in, is in neither.

    Returns:
        The two documents, and the bytes between them; None if the text is too short.
    """
    tokenizer = load_tokenizer(jobs[0].tokenizer)
    tokens = _gather_tokens(table, jobs)
    sizes = tokenizer.token_bytes()[tokens]
    ends = np.cumsum(sizes)
    text = tokenizer.decode_array(tokens[1:])
    held_out = int(fraction * len(text))
    cut, reach = len(text) - held_out, held_out // 2
    first = max(1, cut - reach)
    for boundary in _BOUNDARIES:
        found = [first + match.end() for match in boundary.finditer(text[first : cut + reach])]
        before, after = ([p for p in found if p <= cut], [p for p in found if p > cut])
        if before and after:
            break
    else:
        return None
    stop = int(np.searchsorted(ends, before[-1], side="right"))  # tokens before the gap
    start = int(np.searchsorted(ends - sizes, after[0]))  # the first token after it
    if stop < 2 or start == len(tokens):
        return None
    both = np.repeat(table, 2)
    both["start"][1] += start - 1  # the last token of the gap, which an end of text replaces
    both["tokens"] = stop, len(tokens) - start + 1
    both["bytes"] = ends[stop - 1], len(text) - ends[start - 1]
    return both, int(ends[start - 1] - ends[stop - 1])


def split_parts(
    table: DocumentTable, fraction: float
) -> tuple[DocumentTable, npt.NDArray[np.bool_], int]:
    """Split a text whose documents are its parts: hold out its end, and leave out a part before.

    Returns:
        The parts in their order in the text, whether each is held out, and the bytes left out.
    """
    table = table[np.argsort(table["start"])]
    ends = np.cumsum(table["bytes"], dtype=np.uint64)
    is_held_out = ends > (1 - fraction) * ends[-1]
    gap = max(0, int(np.argmax(is_held_out)) - 1)
    return np.delete(table, gap), np.delete(is_held_out, gap), int(table["bytes"][gap])


def write_dataset(
    folder: Path, data: DataConfig, identity: str, jobs: Sequence[PieceJob], threads: int
) -> None:
    """Select documents, and write shards and manifest of them into an empty folder.

    Args:
        threads: Threads that look for training passages in the held-out text.

    Raises:
        DataError: A split would be empty, or the disk is full.
    """
    source = get_source(data.source)
    selected, repeated = select_documents(
        locate_documents(jobs),
        is_shuffled=source.is_shuffled,
        max_bytes=data.max_bytes,
        max_tokens=data.max_tokens,
    )
    table = selected
    is_held_out = validation_mask(table, data.validation_fraction, is_grouped=source.is_grouped)
    gap_bytes = None
    if len(table) == 1 and (halves := split_document(table, jobs, data.validation_fraction)):
        table, gap_bytes = halves
        is_held_out = np.array([False, True])
    elif len(table) > 2 and is_one_text([job.unit.get("path", "") for job in jobs]):
        table, is_held_out, gap_bytes = split_parts(table, data.validation_fraction)
    _check_counts(data, len(table), int(is_held_out.sum()))
    dtype = np.dtype(token_pieces.token_dtype(data.vocab_size))
    held_out = table[is_held_out]
    try:
        splits = {"train": _write_documents(folder / "train.bin", table[~is_held_out], jobs)}
        train = np.memmap(folder / "train.bin", dtype, mode="r")
        kept = held_out[_find_new_text(held_out, jobs, train, threads)]
        if not len(kept):
            text = f"data.source = {data.source}: each of the {len(held_out)} held-out documents"
            hint = "raise data.validation_fraction, or give text that repeats itself less"
            message = f"{text} repeats passages of the training text; {hint}"
            raise DataError(message, field="data.validation_fraction")
        splits["validation"] = _write_documents(folder / "validation.bin", kept, jobs)
    except OSError as error:
        raise explain_full_disk(folder, error) from None
    validation = np.memmap(folder / "validation.bin", dtype, mode="r")
    scale = 4 if data.vocabulary.size == 257 else 1  # tokens are bytes
    overlap = {
        str(length): deduplication.measure_overlap(validation, train, length, threads)
        for length in (scale * length for length in deduplication.OVERLAP_LENGTHS)
    }
    short = None
    for column, limit in (("tokens", data.max_tokens), ("bytes", data.max_bytes)):
        available = int(selected[column].sum(dtype=np.uint64))
        if limit is not None and available < limit:
            text = f"data.max_{column} = {limit:,} is more than there is: the whole text has"
            short = f"{text} {available:,} {column}, and all of them are taken"
    found = {
        "licence": source.licence,
        "repeated_documents": repeated,
        "shared_documents": len(held_out) - len(kept),
        "overlap": overlap,
        "short": short,
    }
    gap = {} if gap_bytes is None else {"gap_bytes": gap_bytes}
    write_manifest(folder, data, identity, splits, found | gap)


def explain_full_disk(folder: Path, error: OSError) -> DataError:
    """Return the error of a dataset that cannot be written."""
    hint = "free some space, or set KVLAB_DATA to another disk"
    return DataError(f"{folder} cannot be written ({error.strerror}); {hint}")


def write_manifest(
    folder: Path,
    data: DataConfig,
    identity: str,
    splits: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Any],
) -> None:
    """Write the manifest of the token files in ``folder``.

    Args:
        splits: sha256 of the file, from `write_split`, and what is counted, by split.
        found: what else is known of the text.
    """
    digests = "".join(
        f"{name} {facts['sha256']}{facts.get('parts', '')}\n" for name, facts in splits.items()
    )
    manifest = {
        "schema": DATASET_SCHEMA,
        "identity": identity,
        "source": str(data.source),
        "tokenizer": data.tokenizer_identity,
        **{key: getattr(data, key) for key in _MANIFEST_SETTINGS},
        "dtype": np.dtype(token_pieces.token_dtype(data.vocab_size)).str,
        "splits": splits,
        **found,
        "digest": hashlib.sha256(digests.encode()).hexdigest(),
    }
    write_sealed_json(folder / "manifest.json", manifest)


def _find_new_text(
    held_out: DocumentTable, jobs: Sequence[PieceJob], train: npt.NDArray[np.integer], threads: int
) -> npt.NDArray[np.bool_]:
    """Return which held-out documents are not, in part, passages of the training text."""
    tokenizer = load_tokenizer(jobs[0].tokenizer)
    documents: list[bytes] = []
    for chunk in _iter_chunks(held_out):
        ends = np.cumsum(chunk["tokens"].astype(int))
        documents += map(tokenizer.decode_array, np.split(_gather_tokens(chunk, jobs), ends[:-1]))
    # parts overlap by a passage, which has at most as many tokens as bytes
    size = _SCAN_TOKENS + deduplication.PASSAGE_BYTES
    starts = range(0, len(train), _SCAN_TOKENS)
    parts = (tokenizer.decode_array(train[start : start + size]) for start in starts)
    shares = deduplication.shared_passage_shares(documents, parts, threads)
    return np.asarray(shares <= deduplication.MAX_SHARED)


def _check_counts(data: DataConfig, documents: int, held_out: int) -> None:
    if not documents:
        message = f"data.source = {data.source} has no text; name files that hold some"
        raise DataError(message, field="data.paths" if data.paths else "data.source")
    if held_out in (0, documents):
        share, change = ("all", "lower it") if held_out else ("none", "raise it")
        rule = f"holds out {share} of {format_count(documents, 'document')}; {change}"
        if documents == 1:
            rule = "is too little of a text of one short document; raise it"
        text = f"data.validation_fraction = {data.validation_fraction} {rule}, or give more,"
        message = f"{text} smaller documents: a file each, or a line of .jsonl each"
        raise DataError(message, field="data.validation_fraction")


def _write_documents(path: Path, table: DocumentTable, jobs: Sequence[PieceJob]) -> dict[str, Any]:
    return {
        "documents": len(table),
        "text_bytes": int(table["bytes"].sum(dtype=np.uint64)),
        "tokens": int(table["tokens"].sum(dtype=np.uint64)),
        "sha256": write_split(path, (_gather_tokens(one, jobs) for one in _iter_chunks(table))),
    }


def write_split(path: Path, chunks: Iterable[npt.NDArray[np.unsignedinteger]]) -> str:
    """Write a file of tokens; return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk.data)
            digest.update(chunk.data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


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
    chunk: DocumentTable, jobs: Sequence[PieceJob]
) -> npt.NDArray[np.unsignedinteger]:
    """Concatenate the tokens of the documents of ``chunk``; one piece is open at a time."""
    tokenizer = load_tokenizer(jobs[0].tokenizer)
    dtype: np.dtype[Any] = np.dtype(token_pieces.token_dtype(tokenizer.vocab_size))
    lengths = chunk["tokens"].astype(np.int64)
    starts = chunk["start"].astype(np.int64)
    ends = np.cumsum(lengths)
    result = np.empty(int(ends[-1]), dtype)
    for piece in np.unique(chunk["piece"]):
        tokens = np.memmap(jobs[piece].tokens_path, dtype, mode="r")
        for i in np.flatnonzero(chunk["piece"] == piece):
            length, start, end = lengths[i], starts[i], ends[i]
            result[end - length : end] = tokens[start : start + length]
    result[ends - lengths] = tokenizer.end_of_text  # in place of text where a document was split
    return result
