"""One unit of a source as tokens on disk, with a table of its documents.

A piece depends on its unit's text and on the tokenizer alone. It is kept until the whole dataset
is written, so that an interrupted preparation goes on where it was.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvlab.data.source import Unit
from kvlab.data.sources import SOURCES
from kvlab.data.tokenizers import tokenizer, utf8
from kvlab.files import write_atomic

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Table = npt.NDArray[np.void]

DOCUMENT = np.dtype(
    [("hash", "<u8"), ("order", "<u8"), ("split", "<u8"), ("bytes", "<u4"), ("tokens", "<u4")]
)
"""A document: three numbers from its sha256, its UTF-8 bytes, and its tokens with end-of-text.

Names, order and split come from different bytes, so that none depends on another.
"""


@dataclass(frozen=True)
class Job:
    """What a process is asked to do with one unit; plain data.

    Attributes:
        order_limit: leave out documents whose ``order`` is above it; None keeps all.
        survey: only the table, no tokens.
    """

    source: str
    tokenizer: str
    folder: str
    unit: Unit
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


def write_piece(job: Job) -> None:
    """Does ``job`` unless it is done. The table is written last and says that it is.

    Raises:
        DataError: the text cannot be read.
        StoreError: the folder cannot be written.
    """
    if job.table_path.exists():
        return
    words = tokenizer(job.tokenizer)
    dtype = token_dtype(words.vocab_size)
    rows, tokens = [], bytearray()
    end_of_text = dtype(words.end_of_text).tobytes()
    for text, size, numbers in _documents(job):
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
    np.save(table, np.array(rows, DOCUMENT))
    write_atomic(job.table_path, table.getvalue())


def read_table(job: Job) -> Table:
    """The documents of a piece that is written, shape (documents,), dtype `DOCUMENT`."""
    table: Table = np.load(job.table_path, allow_pickle=False)
    return table


def _documents(job: Job) -> Iterator[tuple[str, int, tuple[int, int, int]]]:
    """Text, its bytes, and the three numbers of its digest."""
    for text in SOURCES[job.source].read(job.unit):
        if not text or text.isspace():
            continue
        raw = utf8(text)
        digest = hashlib.sha256(raw).digest()
        name, order, split = (int.from_bytes(digest[at : at + 8], "big") for at in (0, 8, 16))
        if job.order_limit is None or order <= job.order_limit:
            yield text, len(raw), (name, order, split)
