"""The identity of a text: what it is and how it is cut into tokens, never where it lies."""

import hashlib
import json

from kvlab.data.sources import SOURCES
from kvlab.spec import DataConfig

RECIPE = 1
"""Goes up when the same text comes to give other tokens: reading, cleaning, order, split."""


def identity(data: DataConfig) -> str:
    """64 hex digits, equal exactly if `prepare` gives equal tokens. Nothing is tokenised.

    Raises:
        DataError: the text is not there.
    """
    facts = {
        "recipe": RECIPE,
        "source": data.source,
        "text": SOURCES[data.source].identity(data),
        "tokenizer": data.tokenizer,
        "max_bytes": data.max_bytes,
        "validation_fraction": data.validation_fraction,
    }
    if data.max_tokens is not None:
        facts["max_tokens"] = data.max_tokens
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
