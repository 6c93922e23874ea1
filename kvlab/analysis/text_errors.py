"""The standard error of a loss, or of a difference of losses, over texts.

Another draw of held-out documents would give another loss. The tokens of a document depend on each
other, so errors are clustered by document (Liang and Zeger 1986; for evaluations of language
models Miller, arXiv 2411.00640). The error over seeds is another one: it says what another training
would give on the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Texts = Mapping[str, Mapping[str, Sequence[float]]]
"""Losses by document, see `kvlab.store.Store.texts`."""

Floats = npt.NDArray[np.float64]

TEXT_METRICS = ("loss", "loss_served", "serving_gap")


@dataclass(frozen=True)
class TextEstimate:
    """A mean over the tokens of many documents.

    Attributes:
        value: nats per token.
        error: standard error over documents; None if there is one document alone.
        documents, tokens: how many.
    """

    value: float
    error: float | None
    documents: int
    tokens: int


def text_columns(texts: Texts, metric: str) -> tuple[Floats, Floats, Floats] | None:
    """Return indices of documents, their tokens and their summed nats, each (documents,).

    Args:
        metric: one of `TEXT_METRICS`.

    Returns:
        None if the trial recorded none.
    """
    columns = texts.get("loss" if metric == "loss" else "served")
    if columns is None:
        return None
    nats = np.asarray(columns["nats"], dtype=np.float64)
    if metric == "serving_gap":
        nats = nats - np.asarray(columns["one_shot_nats"], dtype=np.float64)
    documents, tokens = (np.asarray(columns[name], float) for name in ("documents", "tokens"))
    return documents, tokens, nats


def estimate_over_texts(tokens: Floats, nats: Floats) -> TextEstimate:
    """Return sum(nats) / sum(tokens) with its standard error clustered by document.

    This is the linearized error of a ratio, which of a mean over tokens is the cluster-robust one.

    Args:
        tokens: scored tokens of each document, (documents,).
        nats: summed losses, or differences of them, (documents,).
    """
    total, count = float(tokens.sum()), len(tokens)
    value = float(nats.sum()) / total
    residuals = nats - value * tokens
    error = None
    if count > 1:
        error = float(np.sqrt(count / (count - 1) * np.square(residuals).sum()) / total)
    return TextEstimate(value, error, count, int(total))
