"""Tokenizers of checkpoints: byte-level or byte-fallback BPE in Hugging Face's tokenizer.json."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.data.data_dir import cached_sha256
from kvlab.data.tokenizers import END_OF_TEXT, Tokenizer, byte_letters, encode_utf8
from kvlab.errors import DataError, PretrainedError
from kvlab.extensions.published_weights.files import read_checkpoint_json, resolve_checkpoint_folder
from kvlab.humanize import summarize_error

MAX_TOKENIZER_BYTES = 100_000_000
MAX_ID = 10_000_000

_SAMPLE = "A ge\u00f6ffneter Brief,\n\n  dated 1851: \u65e5\u672c\u8a9e, \U0001f44d!"


class CheckpointTokenizer(Tokenizer):
    """A checkpoint's tokenizer, by the `tokenizers` library.

    Text never becomes a special token. A token's bytes are those that it stands for, so a document
    of a tokenizer that puts a space before each has one byte more than its text.

    Args:
        name: the folder or repository, as a spec has it.
        folder: where ``tokenizer.json`` is.

    Raises:
        PretrainedError: there is none, it is of another kind, or text does not survive it.
    """

    def __init__(self, name: str, folder: Path):
        try:
            from tokenizers import Tokenizer as HFTokenizer
        except ImportError:
            text = f"{folder}/tokenizer.json is read by the package tokenizers"
            raise PretrainedError(f"{text}; run pip install tokenizers") from None
        facts = read_checkpoint_json(folder, "tokenizer.json", MAX_TOKENIZER_BYTES)
        try:
            self._pieces = _list_pieces(facts)
            self._encoder = HFTokenizer.from_str(json.dumps(facts))
        except Exception as error:  # of a file of any content
            reason = summarize_error(error)
            text = f"{folder}/tokenizer.json is no byte-level or byte-fallback BPE: {reason}"
            raise PretrainedError(text) from None
        self._encoder.encode_special_tokens = True  # as text
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.name, self.vocab_size = name, len(self._pieces)
        self._end_of_text = _find_end_of_text(facts, folder)
        if not self.decode_array(self.encode_array(_SAMPLE)).endswith(_SAMPLE.encode()):
            raise PretrainedError(f"{folder}/tokenizer.json changes text, so no loss can be of it")

    @property
    def end_of_text(self) -> int:
        return self._end_of_text

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        found = self._encoder.encode(encode_utf8(text).decode(), add_special_tokens=False)
        return np.array(found.ids, np.uint32)

    def _decode_text(self, ids: npt.NDArray[np.integer]) -> bytes:
        return b"".join(self._pieces[token] for token in ids.tolist())

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.array([len(piece) for piece in self._pieces])


def _list_pieces(facts: dict[str, Any]) -> list[bytes]:
    """Return the bytes that each id stands for, none of special tokens and of ids without a token.

    Raises:
        Exception: of any kind, where the file is of another kind.
    """
    model = facts["model"]
    if model["type"] != "BPE":
        raise ValueError(f"model.type is {model['type']}")
    added = {one["id"]: one for one in facts["added_tokens"]}
    by_id = {number: token for token, number in model["vocab"].items()}
    letters = None if model.get("byte_fallback") else byte_letters()
    if (largest := max([*added, *by_id])) > MAX_ID:  # before memory is taken for them
        raise ValueError(f"it has the id {largest:,}, and ids end at {MAX_ID:,}")
    pieces = [b""] * (1 + largest)
    for number, token in by_id.items():
        if number in added:
            continue
        if letters is not None:
            pieces[number] = bytes(letters[letter] for letter in token)
        elif len(token) == 6 and token.startswith("<0x"):
            pieces[number] = bytes([int(token[3:5], 16)])
        else:
            pieces[number] = token.replace("\u2581", " ").encode()
    for number, one in added.items():
        pieces[number] = b"" if one["special"] else one["content"].encode()
    return pieces


def _find_end_of_text(facts: dict[str, Any], folder: Path) -> int:
    """Return the id of what separates documents in a training: ``<|endoftext|>``, or if there is no
    such token, what begins a text, or what ends one."""
    ids = {one["content"]: int(one["id"]) for one in facts["added_tokens"] if one["special"]}
    try:
        names = read_checkpoint_json(folder, "tokenizer_config.json", MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        names = {}
    wanted: list[Any] = [END_OF_TEXT]
    for key in ("bos_token", "eos_token"):
        token = names.get(key)
        wanted.append(token.get("content") if isinstance(token, dict) else token)
    for token in wanted:
        if isinstance(token, str) and token in ids:
            return ids[token]
    text = f"{folder}/tokenizer.json has no token that separates documents"
    raise PretrainedError(f"{text}; name bos_token in tokenizer_config.json")


def load_checkpoint_tokenizer(name: str, *, download: bool = True) -> CheckpointTokenizer:
    """Return the tokenizer of a folder or a repository.

    Args:
        download: get missing files from the hub.

    Raises:
        PretrainedError: it is not available, or not of a kind that is read.
    """
    folder, digest = _find_tokenizer(name, download=download)
    return _load(name, folder, digest)


@lru_cache(maxsize=4)
def _load(name: str, folder: Path, digest: str) -> CheckpointTokenizer:  # noqa: ARG001 (of its file)
    return CheckpointTokenizer(name, folder)


def _find_tokenizer(name: str, *, download: bool) -> tuple[Path, str]:
    """Return the folder of ``tokenizer.json``, and the sha256 of the file."""
    folder = resolve_checkpoint_folder(name, download=download)
    path = folder / "tokenizer.json"
    if not path.is_file():
        text = f"{name} has no tokenizer.json"
        raise PretrainedError(f"{text}; name a checkpoint that has one, or another tokenizer")
    try:
        return folder, cached_sha256([path.resolve()])[path.resolve()]
    except DataError as error:
        raise PretrainedError(str(error)) from None


def has_tokenizer(name: str) -> bool:
    """Return whether a checkpoint that is on this machine has a ``tokenizer.json``."""
    try:
        _find_tokenizer(name, download=False)
    except PretrainedError:
        return False
    return True


def find_vocabulary(name: str) -> tuple[int, int]:
    """Return the number of ids of a checkpoint's tokenizer, and the one that separates documents.

    Raises:
        PretrainedError: it is not on this machine.
    """
    tokenizer = load_checkpoint_tokenizer(name, download=False)
    return tokenizer.vocab_size, tokenizer.end_of_text


def identify_tokenizer(name: str) -> str:
    """Return what names a tokenizer's ids: the sha256 of ``tokenizer.json``, wherever it lies.

    Of a repository that is not on this machine yet, it is a name in its place.

    Raises:
        DataError: a folder has none.
    """
    try:
        _, digest = _find_tokenizer(name, download=False)
    except PretrainedError as error:
        if Path(name).is_absolute():
            text = f"data.tokenizer = {Path(name).name}: {error}"
            raise DataError(text, field="data.tokenizer") from None
        return f"absent {name}"
    return f"tokenizer.json {digest[:16]}"
