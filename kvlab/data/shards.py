"""Open prepared datasets: two files of token ids, and a manifest that describes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import TypedDict

from kvlab.data.data_dir import cached_sha256
from kvlab.errors import DataError, DatasetDamaged, StoreError
from kvlab.fs.atomic_files import file_sha256
from kvlab.fs.sealed_files import check_form, read_sealed_json

DATASET_SCHEMA = 2
SPLITS = ("train", "validation")

ACCEPTED_OVERLAP = 0.01
"""Largest share of held-out tokens inside training passages without a warning."""


class PartedTokens(np.memmap[Any, np.dtype[Any]]):
    """Token ids, mapped from disk; what is selected of them is a plain array.

    Attributes:
        part_tokens: Tokens of each source, one after the other; empty if there is one.
    """

    part_tokens: tuple[int, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        return self.view(np.ndarray)[key]


class _SplitForm(TypedDict):
    tokens: Annotated[int, Field(ge=1, le=1 << 50)]
    documents: Annotated[int, Field(ge=0, le=1 << 50)]
    text_bytes: Annotated[int, Field(ge=0, le=1 << 60)]
    sha256: str
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
        train: Token ids, shape (tokens,), uint16 or uint32, read-only, mapped from disk.
        validation: As ``train``, of the held-out documents.
        overlap: Share of validation tokens inside an n-gram of the training text, by n.
    """

    folder: Path
    identity: str
    tokenizer: str
    licence: str
    digest: str
    train: npt.NDArray[np.unsignedinteger]
    validation: npt.NDArray[np.unsignedinteger]
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

    Tokens are compared with their sha256. What was read here before, and has the same size, time
    and inode, is not read again.

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
        if cached_sha256([path])[path] != splits[split]["sha256"]:
            raise DatasetDamaged(f"{path} is damaged: it does not have its sha256")
        tokens[split] = PartedTokens(path, dtype, mode="r")
        tokens[split].part_tokens = tuple(splits[split].get("parts", ()))
    return Dataset(
        folder=folder,
        **{key: manifest[key] for key in ("identity", "tokenizer", "licence", "digest")},
        train=tokens["train"],
        validation=tokens["validation"],
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
