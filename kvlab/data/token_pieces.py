"""One unit of a source as tokens on disk, with a table of its documents.

A piece depends on its unit's text and on the tokenizer alone. It is kept until the whole dataset
is written, so that an interrupted preparation goes on where it was.
"""

import hashlib
import io
import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvlab.data.sources import get_source
from kvlab.data.text_source import TextUnit
from kvlab.data.tokenizers import encode_utf8, load_tokenizer
from kvlab.errors import DataError
from kvlab.fs.atomic_files import write_atomic

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
DocumentTable = npt.NDArray[np.void]

DOCUMENT_DTYPE = np.dtype(
    [("hash", "<u8"), ("order", "<u8"), ("split", "<u8"), ("bytes", "<u4"), ("tokens", "<u4")]
)
"""A document: three numbers from its sha256, its UTF-8 bytes, and its tokens with end-of-text.

Names, order and split come from different bytes, so that none depends on another.
"""


@dataclass(frozen=True)
class PieceJob:
    """What a process is asked to do with one unit; plain data.

    Attributes:
        order_limit: leave out documents whose ``order`` is above it; None keeps all.
        survey: only the table, no tokens.
    """

    source: str
    tokenizer: str
    folder: str
    unit: TextUnit
    order_limit: int | None = None
    survey: bool = False

    @property
    def name(self) -> str:
        """Of the piece's files: the unit and what is asked of it."""
        asked = f"{self.unit['key']} {self.order_limit} {self.survey}"
        return hashlib.sha256(asked.encode()).hexdigest()[:32]

    @property
    def tokens_path(self) -> Path:
        return Path(self.folder) / f"{self.name}.tokens"

    @property
    def table_path(self) -> Path:
        return Path(self.folder) / f"{self.name}.npy"


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def write_piece(job: PieceJob) -> None:
    """Does ``job`` unless it is done. The table is written last and says that it is.

    Raises:
        DataError: the text cannot be read.
        StoreError: the folder cannot be written.
    """
    if job.table_path.exists():
        return
    words = load_tokenizer(job.tokenizer)
    dtype = token_dtype(words.vocab_size)
    rows, tokens = [], bytearray()
    end_of_text = dtype(words.end_of_text).tobytes()
    for text, size, numbers in _iter_documents(job):
        count = 0
        if not job.survey:
            ids = words.encode_array(text).astype(dtype)
            count = 1 + len(ids)
            tokens += end_of_text
            tokens += ids.data
        rows.append((*numbers, size, count))
    if not job.survey:
        write_atomic(job.tokens_path, tokens)
    table = io.BytesIO()
    np.save(table, np.array(rows, DOCUMENT_DTYPE))
    write_atomic(job.table_path, table.getvalue())


def read_document_table(job: PieceJob) -> DocumentTable:
    """The documents of a piece that is written, shape (documents,), dtype `DOCUMENT`."""
    table: DocumentTable = np.load(job.table_path, allow_pickle=False)
    return table


def _iter_documents(job: PieceJob) -> Iterator[tuple[str, int, tuple[int, int, int]]]:
    """Text, its bytes, and the three numbers of its digest."""
    for text in get_source(job.source).read(job.unit):
        if not text or text.isspace():
            continue
        raw = encode_utf8(text)
        digest = hashlib.sha256(raw).digest()
        name, order, split = (int.from_bytes(digest[at : at + 8], "big") for at in (0, 8, 16))
        if job.order_limit is None or order <= job.order_limit:
            yield text, len(raw), (name, order, split)


# Pieces made in several processes.
#
# These are plain children that talk over pipes. A fork of a process that holds torch or Ray may
# hang, and a spawned one runs the caller's main module again; these do neither.


class TokenizerPool:
    """``count`` processes; with one, the work is done right here when it is asked for."""

    def __init__(self, count: int):
        self.count = count
        self._children: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count) if count > 1 else None

    def __enter__(self) -> "TokenizerPool":
        return self

    def submit(self, job: PieceJob) -> "Future[None]":
        """The piece of ``job``, when it is written; the future raises what `write_piece` does."""
        if self._threads is not None:
            return self._threads.submit(self._ask, job)
        done: Future[None] = Future()
        write_piece(job)
        done.set_result(None)
        return done

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._threads is None:
            return
        # What is under way is no longer wanted: either all is there, or all is lost.
        for child in self._children:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.kill()  # also one that a thread was about to start
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(OSError):  # unsent words to a child that is gone
                        pipe.close()

    def _ask(self, job: PieceJob) -> None:
        child = self._free_child()
        try:
            answer = _exchange(child, json.dumps(asdict(job)))
        finally:
            self._idle.put(child)
        if "refused" in answer:
            raise DataError(answer["refused"])
        if "broken" in answer:
            raise RuntimeError(f"a tokenising process failed:\n{answer['broken']}")

    def _free_child(self) -> "subprocess.Popen[str]":
        # As many threads as children at most, so one without a free child may start one.
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            child = _start_worker()
            self._children.append(child)
            return child


def available_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_worker() -> "subprocess.Popen[str]":
    # The child finds what we import, however we came to find it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", "from kvlab.data.worker import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _exchange(child: "subprocess.Popen[str]", question: str) -> dict[str, str]:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(f"{question}\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        answer = ""
    if not answer:
        text = f"a tokenising process ended early (exit status {child.wait()})"
        raise DataError(f"{text}; it may have run out of memory; run again, it goes on")
    found: dict[str, str] = json.loads(answer)
    return found
