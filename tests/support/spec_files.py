"""Small specs as text, written to files and loaded as a user's are."""

from pathlib import Path

import pytest

from kvlab.errors import SpecError
from kvlab.spec import Sweep, load_sweep

EXPERIMENT = """\
name: small
model: {n_layer: 6, n_head: 4, n_embd: 64, block_size: 128, vocab_size: 300}
data: {tokenizer: bytes}
training: {tokens: 10e3, batch_tokens: 256}
benchmark: {prompt_tokens: 64, new_tokens: 32}
"""


def write_spec(folder: Path, text: str, name: str = "e.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load_sweep_text(folder: Path, text: str, name: str = "s.yaml") -> Sweep:
    """Write a sweep beside `EXPERIMENT`, as ``e.yaml``, and load it."""
    write_spec(folder, EXPERIMENT)
    return load_sweep(write_spec(folder, text, name))


def sweep_errors(folder: Path, text: str) -> str:
    """Load a sweep that has problems; return the text, with places relative to ``folder``."""
    with pytest.raises(SpecError) as caught:
        load_sweep_text(folder, text)
    return str(caught.value).replace(f"{folder}/", "")
