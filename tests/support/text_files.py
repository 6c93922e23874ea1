"""Text files in every format, as other programs write them, and readings of prepared tokens."""

import gzip
import json
import lzma
import random

import pyarrow as pa
import zstandard
from pyarrow import parquet

from kvlab.data.tokenizers import load_tokenizer
from kvlab.spec import DataConfig

PACKINGS = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: zstandard.ZstdCompressor().compress(raw),
}


def files_config(*paths, **settings):
    """Return the `data` section of some files, whose tokens are bytes unless it says otherwise."""
    settings = {"tokenizer": "bytes", **settings}
    return DataConfig(source="files", paths=tuple(map(str, paths)), **settings)


def write_jsonl(path, texts, packing=""):
    raw = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACKINGS[packing](raw.encode()))
    return path


def write_parquet(path, texts, row_group_size=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"text": texts, "id": list(map(str, range(len(texts))))}
    parquet.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def stories(count, *, seed=0, words=60):
    """Return ``count`` different short documents."""
    draw = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ter", "an", "dré", "猫", "ost", "ver", "na"]
    return [
        f"Story {seed}-{number}. "
        + " ".join("".join(draw.choices(syllables, k=3)) for _ in range(words))
        for number in range(count)
    ]


def documents(tokens, name):
    """Return the texts of a token array, split at the end-of-text tokens."""
    words = load_tokenizer(name)
    texts, current = [], []
    for token in tokens.tolist():
        if token == words.end_of_text:
            texts.append(current)
            current = []
        else:
            current.append(token)
    texts.append(current)
    assert texts[0] == [], "a document starts with its end-of-text token"
    return [words.decode(ids) for ids in texts[1:]]
