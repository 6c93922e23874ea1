"""How much disk a preparation will take: told before anything is downloaded or tokenised.

Estimates, from what the text weighs: documents are not counted before they are read. They lean
to the high side for English; what is written in the end is checked again, exactly.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvlab.data.sources import get_source
from kvlab.data.token_pieces import token_dtype
from kvlab.errors import DataError
from kvlab.spec import DataConfig

_BYTES_PER_DOUBLING = 0.4
"""Bytes more a token for twice the ranks: GPT-2's 50,256 then hold 4.0 bytes of text each. Web
prose has 4.6, technical documentation 3.1."""


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes still to be written, about.

    Attributes:
        download: the source's files that are not here.
        pieces: the tokens of its parts, which are kept until the whole is there.
        shards: the tokens of the whole.
        there: of the pieces, from an earlier run.
    """

    download: int
    pieces: int
    shards: int
    there: int

    @property
    def total(self) -> int:
        return self.download + max(0, self.pieces - self.there) + self.shards


def estimate_disk_use(data: DataConfig, pieces: Path) -> DiskEstimate | None:
    """What preparing ``data`` will write, with its pieces in ``pieces``; None: nobody knows.

    Raises:
        DataError: the text is not there.
    """
    source = get_source(data.source)
    text = source.text_bytes(data)
    a_token = estimate_bytes_per_token(data.ranks)
    asked = data.max_bytes if data.max_tokens is None else data.max_tokens * a_token
    if text is None and asked is None:
        return None
    wanted = min(amount for amount in (text, asked) if amount is not None)
    # Text in no fair order is read to its end; a limit of tokens is found only in its pieces.
    read = wanted if source.shuffled else text
    kept = wanted if source.shuffled or data.max_tokens is None else text
    item = np.dtype(token_dtype(data.vocab_size)).itemsize
    of_pieces, of_all = (math.ceil((amount or 0) / a_token) * item for amount in (kept, wanted))
    there = sum(path.stat().st_size for path in pieces.glob("*.tokens"))
    return DiskEstimate(source.missing_bytes(data, math.ceil(read or 0)), of_pieces, of_all, there)


def estimate_bytes_per_token(ranks: int) -> float:
    """Of English text, about, in the first ``ranks`` of GPT-2's byte pairs; 256 are bytes."""
    return 1 + _BYTES_PER_DOUBLING * math.log2(ranks / 256)


def check_disk_space(data: DataConfig, folder: Path, pieces: Path) -> None:
    """Refuses what the disk of ``folder`` cannot hold.

    Raises:
        DataError: it has too little free, or the text is not there.
    """
    wanted = estimate_disk_use(data, pieces)
    free = shutil.disk_usage(folder).free
    if wanted is None or wanted.total <= free:
        return
    parts = [(wanted.download, "to download"), (wanted.pieces, "of pieces"),
             (wanted.shards, "of tokens")]  # fmt: skip
    listed = ", ".join(f"{_size(size)} {what}" for size, what in parts if size)
    there = f", less {_size(wanted.there)} already there" if wanted.there else ""
    text = f"{folder} has {_size(free)} free, and data.source = {data.source} needs about"
    way_out = "free some, ask for less (data.max_tokens), or set KVLAB_DATA to another disk"
    raise DataError(f"{text} {_size(wanted.total)} more: {listed}{there}; {way_out}")


def _size(count: int) -> str:
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1000:.1f} kB"
