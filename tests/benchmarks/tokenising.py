"""A tokenising process of `prepare` against tiktoken's own loop over the same documents."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvlab.data.pieces import Job, write_piece
from kvlab.data.sources import SOURCES
from kvlab.data.tokenizers import tokenizer
from kvlab.spec import DataConfig

MEGABYTES, ROUNDS = 12, 5


def run() -> Iterator[str]:
    """MB of text a second on one core, and the share of tiktoken's rate."""
    texts = _texts()
    size = sum(len(text.encode()) for text in texts) / 10**6
    encoding = tokenizer("gpt2")._encoding
    alone = ours = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        units = list(SOURCES["files"].units(_data(str(path)), lambda _: None))
        for number in range(ROUNDS):
            began = time.perf_counter()
            for text in texts:
                encoding.encode_ordinary(text)
            alone = min(alone, time.perf_counter() - began)
            pieces = Path(folder) / str(number)
            pieces.mkdir()
            began = time.perf_counter()
            for unit in units:
                write_piece(Job("files", "gpt2", str(pieces), unit))
            ours = min(ours, time.perf_counter() - began)
    yield f"{size:.0f} MB of jsonl, {len(texts):,} documents, gpt2; best of {ROUNDS} rounds in turn"
    yield f"tiktoken alone {size / alone:.1f} MB/s; read, hashed, tokenised and written"
    yield f"{size / ours:.1f} MB/s: {alone / ours:.0%}"


def _data(path: str) -> DataConfig:
    return DataConfig(source="files", paths=(path,))


def _texts() -> list[str]:
    """The documentation inside the installed packages, again and again with another beginning."""
    data, source = DataConfig(source="docstrings"), SOURCES["docstrings"]
    found: list[str] = []
    size = 0
    while size < MEGABYTES * 10**6:
        for unit in source.units(data, lambda _: None):
            for text in source.read(unit):
                found.append(f"{len(found)} {text}")
                size += len(text)
            if size >= MEGABYTES * 10**6:
                break
    return found
