"""What would narrow an effect's interval most: seeds, scored tokens or steps.

The variance of a mean difference over S seeds has two parts: a / S of training (another seed trains
other weights) and b / T of the text that is scored. Every seed scores the same text, so the error
over seeds contains of the text only how the documents act on each seed's weights differently, and
the error over texts says what another text of the size would change.
Comparing the error over texts at one seed with that of the mean over seeds tells the first from the
rest. More steps narrow an interval only as far as the levels are not yet at the end of learning.

The standard error of a loss, or of a difference of losses, over texts.

Another draw of held-out documents would give another loss. The tokens of a document depend on each
other, so errors are clustered by document (Liang and Zeger 1986; for evaluations of language
models Miller, arXiv 2411.00640). The error over seeds is another one: it says what another training
would give on the same text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlab.analysis.effects import Effect
from kvlab.analysis.statistics import t_quantile
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels

Floats = npt.NDArray[np.float64]

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


@dataclass(frozen=True)
class Precision:
    """The errors of one effect, and half the width of its simultaneous interval.

    Attributes:
        seed_error: Standard error over seeds, which the interval is made from.
        text_error: Standard error over documents of the scored text.
        reach: Half the width of the interval.
        reach_with_seeds: The same with twice as many seeds.
        reach_with_tokens: The same with twice as many scored tokens.
    """

    effect: Effect
    seed_error: float
    text_error: float
    reach: float
    reach_with_seeds: float
    reach_with_tokens: float

    @property
    def helps_most(self) -> Literal["seeds", "scored tokens"]:
        """What to double: it narrows the interval, or the larger error beside it."""
        is_text = self.text_error > self.seed_error
        is_faster = self.reach_with_tokens < self.reach_with_seeds
        return "scored tokens" if is_text or is_faster else "seeds"


def estimate_precision(study: Study, effect: Effect) -> Precision | None:
    """Return the precision of an effect.

    Returns:
        None if it was not tested, or if trials have no losses by document.
    """
    if not effect.has_interval or effect.metric not in TEXT_METRICS:
        return None
    sums = _sum_by_document(study, effect.metric, effect.weights, effect.seeds)
    if sums is None:
        return None
    tokens, by_seed = sums
    of_mean = text_error(tokens, by_seed.mean(axis=0))
    of_seeds = [text_error(tokens, one) for one in by_seed]
    if of_mean is None:
        return None
    seeds, error = len(by_seed), effect.tested_error
    single = float(np.mean([one**2 for one in of_seeds if one is not None]))
    by_weights = max(0.0, single - of_mean**2) / (seeds - 1)  # its part of the squared error
    share = min(1.0, by_weights / error.value**2)
    level = 1 - effect.level / 2
    more_df = error.df * (2 * seeds - 1) / (seeds - 1)
    # one end may be cut at zero; of a look, the bound is larger than the quantile
    reach = max(effect.high - effect.value, effect.value - effect.low)
    quantiles = t_quantile(level, more_df) / t_quantile(level, error.df)
    with_seeds, with_tokens = reach * quantiles / 2**0.5, reach * (1 - share / 2) ** 0.5
    return Precision(effect, error.value, of_mean, reach, with_seeds, with_tokens)


def estimate_text_error(
    study: Study, metric: str, weights: Mapping[Levels, float], seeds: Sequence[int]
) -> float | None:
    """Return the standard error over texts of a weighted sum of cells, a mean over seeds.

    Returns:
        None if trials have no losses by document, or a single document.
    """
    if metric not in TEXT_METRICS or not seeds:
        return None
    sums = _sum_by_document(study, metric, weights, seeds)
    return None if sums is None else text_error(sums[0], sums[1].mean(axis=0))


def _sum_by_document(
    study: Study, metric: str, weights: Mapping[Levels, float], seeds: Sequence[int]
) -> tuple[Floats, Floats] | None:
    """Return the scored tokens of each document, and weighted nats by seed and document.

    None if a trial has no losses by document, or was scored on other tokens or documents.
    """
    first: tuple[Floats, Floats] | None = None
    by_seed = []
    for seed in seeds:
        weighted = []
        for levels, weight in weights.items():
            texts = study.store.texts(study.cells[levels][seed].trial)
            if (columns := texts.get("loss" if metric == "loss" else "served")) is None:
                return None
            documents, tokens, nats = (
                np.asarray(columns[name], np.float64) for name in ("documents", "tokens", "nats")
            )
            if metric == "serving_gap":
                nats = nats - np.asarray(columns["one_shot_nats"], np.float64)
            first = first or (documents, tokens)
            if not (np.array_equal(documents, first[0]) and np.array_equal(tokens, first[1])):
                return None
            weighted.append(weight * nats)
        by_seed.append(np.sum(weighted, axis=0))
    return None if first is None else (first[1], np.array(by_seed))


def measure_final_fall(study: Study, share: float = 0.1) -> float | None:
    """Return by how much the baseline's validation loss fell over the last part of its training.

    Args:
        share: The part of the tokens.

    Returns:
        The mean over seeds, in nats per token; None without curves of at least three points.
    """
    falls = []
    for row in study.cells.get(study.baseline, {}).values():
        if len(row.curve) >= 3:
            tokens = [point[1] for point in row.curve]
            losses = [point[2] for point in row.curve]
            earlier = float(np.interp(tokens[-1] * (1 - share), tokens, losses))
            falls.append(earlier - losses[-1])
    return math.fsum(falls) / len(falls) if falls else None
