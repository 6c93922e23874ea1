"""A tokenizing process of `prepare_dataset` against tiktoken's own loop over the same documents.

Processor seconds of this process, its threads included: what others do meanwhile does not count.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvlab.data.sources import get_source
from kvlab.data.token_pieces import PieceJob, write_piece
from kvlab.data.tokenizers import load_tokenizer
from kvlab.spec import DataConfig
from tests.performance.timing import LimitMissed, least_in_turn
from tests.support.text_files import write_jsonl, write_parquet

MEGABYTES, ROUNDS = 12, 5
LIMIT = 0.8
"""Of tiktoken's own speed on one core."""


def run() -> Iterator[str]:
    """MB of text a second on one core, and the share of tiktoken's rate.

    Raises:
        LimitMissed: a format is read and tokenised below `LIMIT`.
    """
    texts = _texts()
    size = sum(len(text.encode()) for text in texts) / 10**6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {"tiktoken alone": partial(_tiktoken, texts)}
        for path in (
            write_jsonl(folder / "text.jsonl", texts), write_parquet(folder / "text.parquet", texts),
        ):  # fmt: skip
            ways[f"{path.suffix[1:]} read, hashed, tokenised and written"] = partial(_ours, path)
        seconds = least_in_turn(ways, ROUNDS)
    yield f"{size:.0f} MB of text, {len(texts):,} documents, gpt2; processor seconds, best of"
    yield f"{ROUNDS} rounds in turn"
    alone = seconds.pop("tiktoken alone")
    yield f"tiktoken alone {size / alone:.1f} MB/s"
    for way, taken in seconds.items():
        yield f"{way} {size / taken:.1f} MB/s: {alone / taken:.0%}"
    share = alone / max(seconds.values())
    if share < LIMIT:
        raise LimitMissed(f"{share:.1%} of tiktoken's speed is below {LIMIT:.0%}")


def _tiktoken(texts: list[str]) -> None:
    encoding = load_tokenizer("gpt2")._encoding
    for text in texts:
        encoding.encode_ordinary(text)


def _ours(path: Path) -> None:
    data = DataConfig(source="files", paths=(str(path),))
    with tempfile.TemporaryDirectory(dir=path.parent) as pieces:
        for unit in get_source("files").units(data, lambda _: None):
            write_piece(PieceJob("files", "gpt2", pieces, unit))


def _texts() -> list[str]:
    """The documentation inside the installed packages, again and again with another beginning."""
    data, source = DataConfig(source="docstrings"), get_source("docstrings")
    found: list[str] = []
    size = 0
    while size < MEGABYTES * 10**6:
        for unit in source.units(data, lambda _: None):
            for text, _ in source.read(unit):
                found.append(f"{len(found)} {text}")
                size += len(text)
            if size >= MEGABYTES * 10**6:
                break
    return found
