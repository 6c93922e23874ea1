"""Open prepared datasets: two files of token ids, and a manifest that describes them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import TypedDict

from kvlab.errors import DataError, DatasetDamaged, StoreError
from kvlab.fs.atomic_files import file_sha256, read_regular
from kvlab.fs.sealed_files import check_form, read_sealed_json

DATASET_SCHEMA = 2
SPLITS = ("train", "validation")

ACCEPTED_OVERLAP = 0.01
"""Largest share of held-out tokens inside training passages without a warning."""


BLOCK_BYTES = 1 << 20
"""Bytes of a token file that have one sha256, so that a training checks only what it reads."""

HASH_BYTES = 32


class CheckedTokens(np.memmap[Any, np.dtype[Any]]):
    """Token ids, mapped from disk, whose blocks are compared with their sha256 when first read.

    Indexing and iteration check, whatever the index, and return plain arrays. Functions of numpy
    that get the whole array do not.

    Args:
        hashes: sha256 of every `BLOCK_BYTES` of the file, concatenated.
        part_tokens: tokens of each source, one after the other; empty if there is one.
    """

    part_tokens: tuple[int, ...] = ()
    _path: Path
    _hashes: bytes
    _is_checked: npt.NDArray[np.bool_]
    _left: int = 0  # of arrays that are made of this one, too
    _block_tokens: int

    def __new__(
        cls, path: Path, dtype: "np.dtype[Any]", hashes: bytes, part_tokens: tuple[int, ...] = ()
    ) -> "CheckedTokens":
        self = cast(CheckedTokens, super().__new__(cls, path, dtype, mode="r"))
        self.part_tokens = part_tokens
        self._path, self._hashes = path, hashes
        self._left = -(-self.nbytes // BLOCK_BYTES)
        if len(hashes) != self._left * HASH_BYTES:
            raise DatasetDamaged(f"{path} does not have one sha256 for each of its blocks")
        self._is_checked = np.zeros(self._left, np.bool_)
        self._block_tokens = BLOCK_BYTES // self.dtype.itemsize
        return self

    def __getitem__(self, key: Any) -> Any:
        plain = self.view(np.ndarray)
        if self._left:
            self._check(key)
        return plain[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def _check(self, key: Any) -> None:
        """Check the blocks that ``key`` selects from."""
        if isinstance(key, slice):
            span = range(*key.indices(len(self)))
            ends = sorted((span[0], span[-1])) if span else (0, -1)
            blocks = np.arange(ends[0] // self._block_tokens, ends[1] // self._block_tokens + 1)
        elif isinstance(key, tuple) or key is None or key is Ellipsis:
            blocks = np.arange(len(self._is_checked))
        else:
            indices = np.asarray(key)
            if indices.dtype == np.bool_:
                indices = np.flatnonzero(indices)
            blocks = np.where(indices < 0, indices + len(self), indices) // self._block_tokens
            blocks = blocks[(blocks >= 0) & (blocks < len(self._is_checked))]  # numpy refuses
        for block in np.unique(blocks[~self._is_checked[blocks]]):
            start = int(block) * self._block_tokens
            data = self.view(np.ndarray)[start : start + self._block_tokens].tobytes()
            expected = self._hashes[int(block) * HASH_BYTES : (int(block) + 1) * HASH_BYTES]
            if hashlib.sha256(data).digest() != expected:
                place = f"bytes {start * self.dtype.itemsize:,} and after"
                raise DatasetDamaged(f"{self._path} is damaged in {place}")
            self._is_checked[block] = True
            self._left -= 1


class _SplitForm(TypedDict):
    tokens: Annotated[int, Field(ge=1, le=1 << 50)]
    documents: Annotated[int, Field(ge=0, le=1 << 50)]
    text_bytes: Annotated[int, Field(ge=0, le=1 << 60)]
    sha256: str
    blocks: str
    parts: NotRequired[list[Annotated[int, Field(ge=1, le=1 << 50)]]]


class _SplitsForm(TypedDict):
    train: _SplitForm
    validation: _SplitForm


class _ManifestForm(TypedDict):
    """What is used of ``manifest.json``, and its types."""

    identity: str
    source: str
    tokenizer: str
    licence: str
    digest: str
    dtype: Annotated[str, Field(pattern="^(<u|uint)(2|4|16|32)$")]
    splits: _SplitsForm
    overlap: NotRequired[
        dict[Annotated[str, Field(pattern="^[0-9]{1,6}$")], Annotated[float, Field(ge=0, le=1)]]
    ]
    short: NotRequired[str | None]
    gap_bytes: NotRequired[Annotated[int, Field(ge=0, le=1 << 60)]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Token ids of a text, each document after an end-of-text token.

    Attributes:
        identity: See `kvlab.data.dataset_identity`.
        train: Token ids, shape (tokens,), uint16 or uint32, read-only, mapped from disk. Blocks
            are checked when they are first read.
        validation: As ``train``, of the held-out documents, checked as a whole when opened.
        bytes_per_token: Validation text bytes per validation token, end-of-text included.
        overlap: Share of validation tokens inside an n-gram of the training text, by n.
    """

    folder: Path
    identity: str
    tokenizer: str
    licence: str
    digest: str
    train: npt.NDArray[np.unsignedinteger]
    validation: npt.NDArray[np.unsignedinteger]
    train_documents: int
    validation_documents: int
    bytes_per_token: float
    overlap: dict[int, float]


@dataclass(frozen=True)
class DatasetFacts:
    """What a plan needs to know of a prepared dataset.

    Attributes:
        digest: sha256 over both token files, which identifies the text.
        held_out_bytes: UTF-8 bytes of the text of the validation split.
        warnings: What is unusual about the text, one line each.
        identity: See `kvlab.data.dataset_identity`.
        parts: Of a text of several sources, training and held-out tokens of each.
    """

    digest: str
    training_tokens: int
    held_out_tokens: int
    held_out_bytes: int
    warnings: tuple[str, ...] = ()
    identity: str = ""
    parts: tuple[tuple[int, int], ...] = ()


def read_dataset_facts(folder: Path) -> DatasetFacts:
    """Read the facts of the dataset in ``folder`` from its manifest."""
    manifest = read_manifest(folder)
    training, held_out = (manifest["splits"][split] for split in SPLITS)
    overlap = {int(n): share for n, share in manifest.get("overlap", {}).items()}
    warnings = [] if manifest.get("short") is None else [manifest["short"]]
    longest = max(overlap, default=0)
    if overlap and overlap[longest] > ACCEPTED_OVERLAP:
        share = f"{overlap[longest]:.1%} of the held-out tokens"
        warnings.append(f"{share} are inside {longest}-grams of the training text")
    if "gap_bytes" in manifest:
        share = held_out["text_bytes"] / (training["text_bytes"] + held_out["text_bytes"])
        text = f"the text is one document, so its last {share:.1%} is held out, after a gap of"
        text = f"{text} {manifest['gap_bytes']:,} bytes: a held-out loss says how well the rest of"
        warnings.append(f"{text} this document is predicted, not other text of its kind")
    return DatasetFacts(
        digest=manifest["digest"],
        training_tokens=training["tokens"],
        held_out_tokens=held_out["tokens"],
        held_out_bytes=held_out["text_bytes"],
        warnings=tuple(warnings),
        identity=manifest["identity"],
        parts=tuple(zip(training.get("parts", []), held_out.get("parts", []), strict=True)),
    )


def open_dataset(folder: Path) -> Dataset:
    """Open the dataset in ``folder``.

    The manifest, the held-out tokens and the sizes are checked at once, training tokens as they
    are read.

    Raises:
        DatasetDamaged: The dataset is not what was written.
    """
    manifest = read_manifest(folder)
    dtype = np.dtype(manifest["dtype"])
    splits = manifest["splits"]
    tokens = {}
    for split in SPLITS:
        path = folder / f"{split}.bin"
        expected = splits[split]["tokens"] * dtype.itemsize
        if not path.is_file() or path.stat().st_size != expected:
            raise DatasetDamaged(f"{path} does not have {expected} bytes")
        hashes_path = path.with_suffix(".sha256")
        hashes = read_regular(hashes_path) if hashes_path.is_file() else b""
        if hashlib.sha256(hashes).hexdigest() != splits[split]["blocks"]:
            raise DatasetDamaged(f"{hashes_path} is not what was written")
        own_parts = tuple(splits[split].get("parts", ()))
        tokens[split] = CheckedTokens(path, dtype, hashes, own_parts)
    held_out = splits["validation"]
    if file_sha256(folder / "validation.bin") != held_out["sha256"]:
        raise DatasetDamaged(f"{folder / 'validation.bin'} does not have its sha256")
    return Dataset(
        folder=folder,
        **{key: manifest[key] for key in ("identity", "tokenizer", "licence", "digest")},
        train=tokens["train"],
        validation=tokens["validation"],
        train_documents=splits["train"]["documents"],
        validation_documents=held_out["documents"],
        bytes_per_token=held_out["text_bytes"] / held_out["tokens"],
        overlap={int(n): share for n, share in manifest.get("overlap", {}).items()},
    )


def verify_dataset(folder: Path) -> list[str]:
    """Read the whole dataset in ``folder`` and return what is wrong with it; empty if nothing."""
    try:
        open_dataset(folder)
        splits = read_manifest(folder)["splits"]
        return [
            f"{folder / split}.bin is damaged: it does not have its sha256"
            for split in SPLITS
            if file_sha256(folder / f"{split}.bin") != splits[split]["sha256"]
        ]
    except (DataError, OSError) as error:
        return [str(error)]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``manifest.json``: the fields of `Dataset`, and counts and sha256 of each split.

    Raises:
        DatasetDamaged: The manifest is damaged, or of another version of kvlab.
        FileNotFoundError: There is none.
    """
    path = folder / "manifest.json"
    try:
        manifest = read_sealed_json(path, "schema", "splits", "digest")
        if manifest["schema"] != DATASET_SCHEMA:
            raise DatasetDamaged(f"{path} is of schema {manifest['schema']}, not {DATASET_SCHEMA}")
        check_form(path, manifest, _ManifestForm)
    except StoreError as error:
        raise DatasetDamaged(str(error)) from None
    return manifest
