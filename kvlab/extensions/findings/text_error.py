"""The standard error of a loss, or of a difference of losses, over texts.

Another draw of held-out documents would give another loss. The tokens of a document depend on each
other, so errors are clustered by document (Liang and Zeger 1986; for evaluations of language
models Miller, arXiv 2411.00640). The error over seeds is another one: it says what another training
would give on the same text.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels

Floats = NDArray[np.float64]

TEXT_METRICS = ("loss", "loss_served", "serving_gap")


def text_error(tokens: Floats, nats: Floats) -> float | None:
    """Return the standard error of sum(nats) / sum(tokens), clustered by document.

    This is the linearized error of a ratio, which of a mean over tokens is the cluster-robust one.

    Args:
        tokens: scored tokens of each document, (documents,).
        nats: summed losses, or differences of them, (documents,).

    Returns:
        None if there is one document alone.
    """
    total, count = float(tokens.sum()), len(tokens)
    if count < 2:
        return None
    residuals = nats - float(nats.sum()) / total * tokens
    return float(np.sqrt(count / (count - 1) * np.square(residuals).sum()) / total)


def estimate_text_error(
    study: Study, metric: str, weights: Mapping[Levels, float], seeds: Sequence[int]
) -> float | None:
    """Return the standard error over texts of a weighted sum of cells, a mean over seeds.

    Returns:
        None if a trial has no losses by document, or was scored on other tokens or documents, or
        if there is a single document.
    """
    if metric not in TEXT_METRICS or not seeds:
        return None
    scored: list[tuple[Floats, Floats]] = []
    by_seed = []
    for seed in seeds:
        weighted = []
        for levels, weight in weights.items():
            texts = study.store.texts(study.cells[levels][seed].trial)
            if (columns := texts.get("loss" if metric == "loss" else "served")) is None:
                return None
            names = "documents", "tokens", "nats"
            documents, tokens, nats = (np.asarray(columns[one], np.float64) for one in names)
            if metric == "serving_gap":
                nats = nats - np.asarray(columns["one_shot_nats"], np.float64)
            scored.append((documents, tokens))
            if not all(map(np.array_equal, scored[-1], scored[0])):
                return None
            weighted.append(weight * nats)
        by_seed.append(np.sum(weighted, axis=0))
    return text_error(scored[0][1], np.mean(by_seed, axis=0))
