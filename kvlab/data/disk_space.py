"""Estimate the disk space that a preparation needs, before anything is downloaded or tokenized.

The estimates are made from the size of the text, since documents are not counted before they are
read. They are high for English. The final tokens are checked again, exactly, when they are written.
"""

import math
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvlab.data.sources import get_source
from kvlab.data.token_pieces import token_dtype
from kvlab.errors import DataError
from kvlab.humanize import format_bytes
from kvlab.spec import DataConfig

_BYTES_PER_DOUBLING = 0.4
"""Bytes of text per token that each doubling of the ranks adds; GPT-2's 50,256 ranks give 4.0.
Measured were 4.6 in web prose and 3.1 in technical documentation."""


class DiskEstimate(NamedTuple):
    """Estimated bytes to write.

    Attributes:
        download: Files of the source that are missing.
        pieces: Tokens of the pieces, which are kept until the dataset is complete.
        shards: Tokens of the dataset.
        existing: Pieces that an earlier run left.
    """

    download: int
    pieces: int
    shards: int
    existing: int

    @property
    def total(self) -> int:
        return self.download + max(0, self.pieces - self.existing) + self.shards


def estimate_disk_use(data: DataConfig, pieces: Path) -> DiskEstimate | None:
    """Estimate what preparing ``data`` writes; None if the amount of text is unknown.

    Args:
        pieces: Folder of the pieces.

    Raises:
        DataError: The text is missing.
    """
    source = get_source(data.source)
    text = source.text_bytes(data)
    per_token = 1 + _BYTES_PER_DOUBLING * math.log2(data.ranks / 256)  # of 256 ranks each is a byte
    limit = data.max_bytes if data.max_tokens is None else data.max_tokens * per_token
    if text is None and limit is None:
        return None
    used = min(amount for amount in (text, limit) if amount is not None)
    # A source that is not shuffled is read to its end, and a limit of tokens is then found only
    # after all of it is tokenized.
    read = used if source.is_shuffled else text
    tokenized = used if source.is_shuffled or data.max_tokens is None else text
    item = np.dtype(token_dtype(data.vocab_size)).itemsize
    return DiskEstimate(
        download=source.missing_bytes(data, math.ceil(read or 0)),
        pieces=math.ceil((tokenized or 0) / per_token) * item,
        shards=math.ceil(used / per_token) * item,
        existing=sum(path.stat().st_size for path in pieces.glob("*.tokens")),
    )


def check_disk_space(data: DataConfig, folder: Path, pieces: Path) -> None:
    """Check that the disk of ``folder`` can hold the dataset and its ``pieces``.

    Raises:
        DataError: Too little is free, or the text is missing.
    """
    needed = estimate_disk_use(data, pieces)
    free = shutil.disk_usage(folder).free
    if needed is None or needed.total <= free:
        return
    parts = [(needed.download, "to download"), (needed.pieces, "of pieces"),
             (needed.shards, "of tokens")]  # fmt: skip
    listed = ", ".join(f"{format_bytes(size)} {what}" for size, what in parts if size)
    existing = f", less {format_bytes(needed.existing)} already there" if needed.existing else ""
    text = f"{folder} has {format_bytes(free)} free, and data.source = {data.source} needs about"
    hint = "free some, ask for less (data.max_tokens), or set KVLAB_DATA to another disk"
    raise DataError(f"{text} {format_bytes(needed.total)} more: {listed}{existing}; {hint}")
