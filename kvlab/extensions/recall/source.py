"""Draw the documents of the source `recall`.

    <end of text> pair pair pair ... (noise) key answer key answer ...

The documents of a unit are a pure function of the options, its place and its size: raw words of a
Philox generator, which are the same in every version of numpy, are sorted or reduced. Held-out ones
are those that their hash selects, as of any text, and no document is drawn twice.

Shapes: D documents, P pairs, Q questions, L tokens without the end of text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from kvlab.data.data_dir import ProgressCallback
from kvlab.data.sources import TextSource, TextUnit
from kvlab.data.tokenizers import SYMBOL_BYTES, symbols_to_text
from kvlab.extensions.recall.config import NOISE_SYMBOLS, RecallConfig, find_config
from kvlab.spec import DataConfig

Array = npt.NDArray[np.int64]

_STREAM = 0x726563616C6C  # separates these draws from other uses of a seed
_UNIT_DOCUMENTS = 2000


class Documents(NamedTuple):
    """D documents of one number of pairs.

    Attributes:
        keys, values: Of each pair, (D, P), in the order of the document.
        asked: The pair that answers each question, (D, Q).
        noise: Symbols before the pairs and after them, counted from 0, (D, N).
    """

    keys: Array
    values: Array
    asked: Array
    noise: Array


def draw_documents(config: RecallConfig, pairs: int, first: int, count: int) -> Documents:
    """Draw the documents ``first`` and after of a number of pairs; ``first`` starts a unit."""
    philox = np.random.Philox(key=[_STREAM, config.seed], counter=[0, 0, pairs, first])

    def draw(width: int) -> npt.NDArray[np.uint64]:
        return philox.random_raw(count * width).reshape(count, width)

    def permute(width: int) -> Array:
        return np.argsort(draw(width), axis=1, kind="stable")

    new = pairs - config.rewrites
    names = permute(config.keys)[:, :new]
    keys = np.concatenate([names, names[:, : config.rewrites]], 1)
    keys = np.take_along_axis(keys, permute(pairs), 1)
    values = (draw(pairs) % np.uint64(config.values)).astype(np.int64)
    uniform = (draw(config.questions * pairs) >> np.uint64(11)) * 2.0**-53
    asked = _choose_pairs(config, keys, uniform.reshape(count, config.questions, pairs))
    padding = config.pair_tokens * (max(config.pairs) - pairs) + config.gap
    noise = (draw(padding) % np.uint64(NOISE_SYMBOLS)).astype(np.int64)
    return Documents(keys, values, asked, noise)


def _choose_pairs(config: RecallConfig, keys: Array, uniform: npt.NDArray[np.floating]) -> Array:
    """Return the pair (D, Q) of each question: the last one of a key that was not asked before.

    Pair i of weight w is drawn by its exponential clock -log(1 - u) / w (Efraimidis and Spirakis
    2006).
    """
    count, pairs = keys.shape
    same_key = keys[:, :, None] == keys[:, None, :]
    is_open = ~np.triu(same_key, 1).any(2)  # no later pair has its key
    ends = config.pair_tokens * np.arange(1, pairs + 1) - 1
    asked = []
    for question in range(config.questions):
        distances = config.pair_tokens * pairs + config.gap + 2 * question - ends
        weights = distances.astype(np.float64) ** ((config.power or 1.0) - 1)
        clocks = np.where(is_open, -np.log1p(-uniform[:, question]) / weights, np.inf)
        chosen = clocks.argmin(1)
        is_open[np.arange(count), chosen] = False
        asked.append(chosen)
    return np.stack(asked, 1)


def write_tokens(config: RecallConfig, documents: Documents) -> Array:
    """Return token ids (D, L): noise in place of missing pairs, pairs, the gap, and questions."""
    keys, values, asked, noise = documents
    ranges = config.ranges
    if config.form == "fused":
        shown = ranges.pairs.start + keys * config.values + values
    else:
        both = [ranges.keys.start + keys, ranges.values.start + values]
        shown = np.stack(both, 2).reshape(len(keys), 2 * keys.shape[1])
    asked_keys, answers = (np.take_along_axis(part, asked, 1) for part in (keys, values))
    if config.form == "fused":
        answers = asked_keys * config.values + answers
    of_questions = [ranges.keys.start + asked_keys, ranges.answers.start + answers]
    questions = np.stack(of_questions, 2).reshape(len(keys), 2 * asked.shape[1])
    before, after = np.split(ranges.noise.start + noise, [noise.shape[1] - config.gap], axis=1)
    return np.concatenate([before, shown, after, questions], 1)


@final
class Recall(TextSource):
    """Documents that are drawn, one character a token."""

    licence = "none: drawn at random"
    is_shuffled = True

    def identity(self, data: DataConfig) -> Any:
        return find_config(data).identity()

    def text_bytes(self, data: DataConfig) -> int:
        config = find_config(data)
        return SYMBOL_BYTES * config.documents * (config.document_tokens - 1)

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:  # noqa: ARG002
        config = find_config(data)
        settings = config.model_dump(mode="json", exclude={"documents"})
        for first in range(0, config.documents, _UNIT_DOCUMENTS):
            count = min(_UNIT_DOCUMENTS, config.documents - first)
            part = {"settings": settings, "first": first, "count": count}
            yield {"key": f"recall {part}", **part}

    def read(self, unit: TextUnit) -> Iterator[tuple[str, str | None]]:
        config = RecallConfig.model_validate(unit["settings"])
        kinds = len(config.pairs)
        tokens = []
        for number, pairs in enumerate(config.pairs):
            own = len(range(number, unit["count"], kinds))
            tokens.append(write_tokens(config, draw_documents(config, pairs, unit["first"], own)))
        for number in range(unit["count"]):
            yield symbols_to_text(tokens[number % kinds][number // kinds]), None
