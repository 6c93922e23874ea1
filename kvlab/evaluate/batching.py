"""How many rows are scored at once: enough for speed, few enough for memory."""

from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec.parts import ServingConfig

PASS_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Tokens of one forward pass. More than this was no faster on CPU."""

DECODE_ROWS = {"cpu": 64, "cuda": 512}
"""Rows decoded side by side. Measured on one core for the quickstart's shape: 5,500 tokens/s
with 16 rows, 6,500 with 64, 5,100 with 128."""

CACHE_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}
"""The most that the caches of those rows may take."""


def pass_rows(model: GPT, length: int) -> int:
    """Rows of ``length`` tokens in one forward pass."""
    return max(1, _of(PASS_TOKENS, model) // length)


def decode_rows(model: GPT, length: int, serving: ServingConfig | None) -> int:
    """Rows of up to ``length`` tokens whose caches are filled side by side."""
    dtype = str(model.dtype).removeprefix("torch.")
    row = KVLayout.of(model.config, serving).stored_bytes(1, length, dtype)
    return max(1, min(_of(DECODE_ROWS, model), _of(CACHE_BYTES, model) // row))


def _of(table: dict[str, int], model: GPT) -> int:
    return table.get(model.device.type, table["cuda"])
