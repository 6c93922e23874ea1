"""Tokenize the units of a text source into pieces on disk, in several processes.

A piece holds the tokens of one unit and a table of its documents. It depends on the text of the
unit and on the tokenizer alone, and is kept until the dataset is complete, so an interrupted
preparation continues where it stopped.
"""

import hashlib
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvlab.data.deduplication import BANDS, band_hashes
from kvlab.data.sources import TextUnit, get_source
from kvlab.data.tokenizers import encode_utf8, load_tokenizer
from kvlab.errors import DataError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lease import Fence
from kvlab.spec.source_options import DocumentSource

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor  # type: ignore[import-untyped]

DocumentTable = npt.NDArray[np.void]

DOCUMENT_DTYPE = np.dtype([
    ("hash", "<u8"), ("order", "<u8"), ("split", "<u8"), ("bands", "<u8", (BANDS,)),
    ("bytes", "<u4"), ("tokens", "<u4"),
])  # fmt: skip
"""One document: numbers from its sha256, `band_hashes`, UTF-8 bytes, tokens with end-of-text.

``hash`` names it, ``order`` sorts it, ``split`` decides whether it is held out. They come from
different bytes of the sha256, so they are independent. Documents of a group have its ``split``.
"""

_PARENT_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class PieceJob:
    """The tokenization of one unit."""

    source: str | DocumentSource
    tokenizer: str
    folder: str
    unit: TextUnit

    @property
    def table_path(self) -> Path:
        """The table; its name is a hash of the unit."""
        key = hashlib.sha256(self.unit["key"].encode()).hexdigest()
        return Path(self.folder) / f"{key[:32]}.npy"

    @property
    def tokens_path(self) -> Path:
        return self.table_path.with_suffix(".tokens")

    @property
    def is_written(self) -> bool:
        """Whether all of the piece is there; a kill may have left a part of it."""
        return self.table_path.exists() and self.tokens_path.exists()


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest of uint16 and uint32 that holds every token id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def write_piece(job: PieceJob, fence: Fence | None = None) -> None:
    """Write the piece of ``job``, unless it exists. Its table is written last and completes it."""
    if job.is_written:
        return
    tokenizer = load_tokenizer(job.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    rows, tokens = [], bytearray()
    end_of_text = dtype(tokenizer.end_of_text).tobytes()
    for text, group in get_source(job.source).read(job.unit):
        if not text or text.isspace():
            continue
        raw = encode_utf8(text)
        digest = hashlib.sha256(raw).digest()
        group_digest = digest if group is None else hashlib.sha256(encode_utf8(group)).digest()
        name, order = (int.from_bytes(digest[i : i + 8], "big") for i in (0, 8))
        split = int.from_bytes(group_digest[16:24], "big")
        ids = tokenizer.encode_array(text).astype(dtype)
        tokens += end_of_text
        tokens += ids.data
        rows.append((name, order, split, band_hashes(raw), len(raw), 1 + len(ids)))
    write_atomic(job.tokens_path, tokens, fence=fence)
    table = io.BytesIO()
    np.save(table, np.array(rows, DOCUMENT_DTYPE))
    write_atomic(job.table_path, table.getvalue(), fence=fence)


def read_document_table(job: PieceJob) -> DocumentTable:
    """Read the documents of a written piece, shape (documents,), dtype `DOCUMENT_DTYPE`."""
    table: DocumentTable = np.load(job.table_path, allow_pickle=False)
    return table


@contextmanager
def tokenizer_pool(processes: int) -> "Iterator[ProcessPoolExecutor | None]":
    """Yield a pool of so many processes that write pieces; None for one, which is this process.

    loky starts its processes with fork and exec: a fork of a process that holds torch or Ray can
    hang, and multiprocessing's spawn runs the caller's main module again. On exit, work that is
    under way is discarded: every piece is needed, or none is.
    """
    # a daemonic process, such as one of multiprocessing's pool, may not start others
    if processes == 1 or multiprocessing.current_process().daemon:
        yield None
        return
    from loky import ProcessPoolExecutor

    pool = ProcessPoolExecutor(processes, initializer=_prepare_worker, initargs=(os.getpid(),))
    try:
        yield pool
    except BrokenExecutor:
        text = "a tokenizing process ended early; it may have run out of memory"
        raise DataError(f"{text}; run again to continue") from None
    finally:
        pool.shutdown(wait=True, kill_workers=True)


def _prepare_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
