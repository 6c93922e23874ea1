"""Open prepared datasets: two files of token ids, and a manifest that describes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.errors import DataError, StoreError
from kvlab.fs.atomic_files import file_sha256, read_json

DATASET_SCHEMA = 1
SPLITS = ("train", "validation")

ACCEPTED_OVERLAP = 0.01
"""Largest share of held-out tokens inside training passages without a warning."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Token ids of a text, each document after an end-of-text token.

    Attributes:
        identity: See `kvlab.data.dataset_identity`.
        licence: Licence of the text, in words.
        digest: sha256 over both token files.
        train: Token ids, shape (tokens,), uint16 or uint32, read-only, mapped from disk.
        validation: As ``train``, of the held-out documents.
        bytes_per_token: Validation text bytes per validation token, end-of-text included.
        overlap: Share of validation tokens inside an n-gram of the training text, by n.
        shortage: Message if the source has less text than the limit; None if it has enough.
    """

    folder: Path
    identity: str
    source: str
    tokenizer: str
    licence: str
    digest: str
    train: npt.NDArray[np.unsignedinteger]
    validation: npt.NDArray[np.unsignedinteger]
    train_documents: int
    validation_documents: int
    bytes_per_token: float
    overlap: dict[int, float]
    shortage: str | None = None


@dataclass(frozen=True)
class DatasetFacts:
    """What a plan needs to know of a prepared dataset.

    Attributes:
        digest: sha256 over both token files, which identifies the text.
        training_tokens: Tokens of the training split.
        held_out_tokens: Tokens of the validation split.
        held_out_bytes: UTF-8 bytes of the text of the validation split.
        warnings: What is unusual about the text, one line each.
        identity: See `kvlab.data.dataset_identity`.
    """

    digest: str
    training_tokens: int
    held_out_tokens: int
    held_out_bytes: int
    warnings: tuple[str, ...] = ()
    identity: str = ""


def read_dataset_facts(folder: Path) -> DatasetFacts:
    """Read the facts of the dataset in ``folder`` from its manifest.

    Raises:
        DataError: The manifest is damaged.
        FileNotFoundError: There is none.
    """
    manifest = read_manifest(folder)
    training, held_out = (manifest["splits"][split] for split in SPLITS)
    overlap = {int(n): share for n, share in manifest.get("overlap", {}).items()}
    warnings = [] if manifest.get("short") is None else [manifest["short"]]
    longest = max(overlap, default=0)
    if overlap and overlap[longest] > ACCEPTED_OVERLAP:
        share = f"{overlap[longest]:.1%} of the held-out tokens"
        warnings.append(f"{share} are inside {longest}-grams of the training text")
    return DatasetFacts(
        digest=manifest["digest"],
        training_tokens=training["tokens"],
        held_out_tokens=held_out["tokens"],
        held_out_bytes=held_out["text_bytes"],
        warnings=tuple(warnings),
        identity=manifest["identity"],
    )


def open_dataset(folder: Path) -> Dataset:
    """Open the dataset in ``folder``. The files' sizes are checked, their digests are not.

    Raises:
        DataError: The dataset is damaged.
        FileNotFoundError: There is none.
    """
    manifest = read_manifest(folder)
    dtype = np.dtype(manifest["dtype"])
    splits = manifest["splits"]
    tokens = {}
    for split in SPLITS:
        path = folder / f"{split}.bin"
        expected = splits[split]["tokens"] * dtype.itemsize
        if not path.is_file() or path.stat().st_size != expected:
            raise DataError(
                f"{path} does not have {expected} bytes; remove {folder}, prepare again"
            )
        tokens[split] = np.memmap(path, dtype, mode="r")
    held_out = splits["validation"]
    return Dataset(
        folder=folder,
        **{key: manifest[key] for key in ("identity", "source", "tokenizer", "licence", "digest")},
        train=tokens["train"],
        validation=tokens["validation"],
        train_documents=splits["train"]["documents"],
        validation_documents=held_out["documents"],
        bytes_per_token=held_out["text_bytes"] / held_out["tokens"],
        overlap={int(n): share for n, share in manifest.get("overlap", {}).items()},
        shortage=manifest.get("short"),
    )


def verify_dataset(folder: Path) -> list[str]:
    """Read the whole dataset in ``folder`` and return what is wrong with it; empty if nothing."""
    try:
        open_dataset(folder)
        splits = read_manifest(folder)["splits"]
        problems = [
            f"{folder / split}.bin is not what was prepared (wrong sha256)"
            for split in SPLITS
            if file_sha256(folder / f"{split}.bin") != splits[split]["sha256"]
        ]
    except (DataError, OSError) as error:
        return [str(error)]
    return [f"{text}; remove {folder}, prepare again" for text in problems]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``manifest.json``: the fields of `Dataset`, and counts and sha256 of each split.

    Raises:
        DataError: The manifest is damaged.
        FileNotFoundError: There is none.
    """
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
    except StoreError as error:
        raise DataError(str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("schema") != DATASET_SCHEMA:
        raise DataError(f"{path} is not of schema {DATASET_SCHEMA}; remove {folder}, prepare again")
    return manifest
