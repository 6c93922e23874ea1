"""Write the dataset of a mix: the tokens of each source, one source after the other.

All of each source is kept. Its share decides how often its windows are read, and is no part of the
dataset.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.data.dataset_builder import explain_full_disk, write_manifest, write_split
from kvlab.data.shards import SPLITS, Dataset, read_manifest
from kvlab.data.token_pieces import token_dtype
from kvlab.spec import DataConfig

_CHUNK_TOKENS = 16_000_000


def join_datasets(
    folder: Path, data: DataConfig, identity: str, datasets: Sequence[Dataset]
) -> None:
    """Write shards and manifest of a mix into an empty folder, from the datasets of its parts.

    Raises:
        DataError: The disk is full.
    """
    parts, manifests = data.parts, [read_manifest(one.folder) for one in datasets]
    dtype = np.dtype(token_dtype(data.vocab_size))
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        own = [manifest["splits"][split] for manifest in manifests]
        tokens = [dataset.train if split == "train" else dataset.validation for dataset in datasets]
        firsts = [part.first_id for part in parts]
        try:
            sha256 = write_split(folder / f"{split}.bin", _shift(tokens, firsts, dtype))
        except OSError as error:
            raise explain_full_disk(folder, error) from None
        counts = {k: sum(one[k] for one in own) for k in ("documents", "text_bytes", "tokens")}
        splits[split] = {**counts, "parts": [one["tokens"] for one in own], "sha256": sha256}
    names = [part.data.source for part in parts]
    texts = [d for d, p in zip(datasets, parts, strict=True) if p.data.symbol_options is None]
    shorts = [manifest["short"] for manifest in manifests if manifest["short"] is not None]
    found = {
        "licence": "; ".join(f"{n}: {one.licence}" for n, one in zip(names, datasets, strict=True)),
        "repeated_documents": sum(manifest["repeated_documents"] for manifest in manifests),
        "shared_documents": sum(manifest["shared_documents"] for manifest in manifests),
        "overlap": _mean_overlap(texts),
        "short": "; ".join(shorts) or None,
    }
    write_manifest(folder, data, identity, splits, found)


def _shift(
    arrays: Sequence[npt.NDArray[np.unsignedinteger]], firsts: Sequence[int], dtype: "np.dtype[Any]"
) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Yield the ids of sources in the mix, some at a time."""
    for tokens, first in zip(arrays, firsts, strict=True):
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            yield tokens[start : start + _CHUNK_TOKENS].astype(dtype) + dtype.type(first)


def _mean_overlap(texts: Sequence[Dataset]) -> dict[str, float]:
    """Return the overlap of several texts as of one."""
    tokens = sum(len(one.validation) for one in texts)
    return {
        str(length): sum(one.overlap[length] * len(one.validation) for one in texts) / tokens
        for length in texts[0].overlap
    }
