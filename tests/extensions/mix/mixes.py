"""Small mixes, and plain readings of what they are made of that use no code of the mix."""

from pathlib import Path

import numpy as np

from kvlab.data.tokenizers import load_tokenizer
from kvlab.spec import Experiment
from tests.support.text_files import stories

RECALL = {"keys": 6, "values": 3, "pairs": 4, "questions": 4, "gap": 3, "documents": 400}
SYMBOLS = 16 + 6 + 2 * 6 * 3
LENGTH = 1 + 4 + 3 + 2 * 4
"""Tokens of a document of pairs and questions."""


def write_texts(folder: Path, *names, count=80):
    """Write a file of documents for each name; return their paths."""
    paths = []
    for number, name in enumerate(names):
        path = folder / name / "text.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f'{{"text": "{one}"}}\n' for one in stories(count, seed=number))
        path.write_text("".join(lines), encoding="utf-8")
        paths.append(str(path))
    return paths


def experiment(paths, share=0.25, data=(), model=(), training=(), **parts):
    """A model of two layers that reads files and documents of pairs."""
    data = {
        "mix": {"files": 1 - share, "recall": share}, "paths": paths, "tokenizer": "bytes",
        "validation_fraction": 0.3, "recall": RECALL, **dict(data),
    }  # fmt: skip
    model = {
        "vocab_size": 257 + SYMBOLS + 1, "block_size": LENGTH, "n_layer": 2, "n_head": 2,
        "n_embd": 16, "position": "rope", **dict(model),
    }  # fmt: skip
    block = model["block_size"]
    training = {
        "tokens": 8 * block * 8, "batch_tokens": 8 * block, "learning_rate": 1e-2,
        "evaluate_tokens": 10 * block, **dict(training),
    }  # fmt: skip
    return Experiment(
        name="small", model=model, data=data, training=training,
        **{"evaluation": {"loss_tokens": 40 * block}, "benchmark": {"prompt_tokens": 4,
           "new_tokens": 2}, **parts},
    )  # fmt: skip


def split_documents(tokens, ends):
    """Return the documents of tokens, each a tuple that begins with its end of text."""
    starts = np.flatnonzero(np.isin(tokens, list(ends)))
    return [tuple(one.tolist()) for one in np.split(tokens, starts)[1:]]


def encode(texts, tokenizer):
    """Return each text as the tuple of its ids, after an end of text."""
    words = load_tokenizer(tokenizer)
    return {(words.end_of_text, *words.encode(text)) for text in texts}
