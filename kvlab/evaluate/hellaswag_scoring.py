"""HellaSwag (arXiv 1905.07830): which of four endings is the most likely by the model?

Every item is scored in two conventions (see `kvlab.evaluate.hellaswag_prompts`), one-shot and
optionally through the serving cache. The record of each item is kept: comparing two models item
by item detects smaller differences than comparing two percentages.
"""

import math
from collections.abc import Sequence
from typing import Any

from kvlab.data import HellaSwagItem, Tokenizer
from kvlab.evaluate.forward_passes import OnCount
from kvlab.evaluate.hellaswag_prompts import CONVENTIONS, Question, make_question
from kvlab.evaluate.scoring import score_continuations
from kvlab.model import GPT
from kvlab.spec import ServingConfig


def score_hellaswag(
    model: GPT,
    items: Sequence[HellaSwagItem],
    tokenizer: Tokenizer,
    serving: ServingConfig | None = None,
    on_progress: OnCount = lambda _: None,
    conventions: Sequence[str] = tuple(CONVENTIONS),
) -> list[dict[str, Any]]:
    """Return one record per item, in their order.

    Args:
        serving: score a second time, token by token through this cache. None: do not.
        on_progress: called with the number of endings that are newly scored. In total there are
            items x 4 endings x conventions x scoring modes.
        conventions: names of the `CONVENTIONS` to score.

    Returns:
        ``{"ind", "label", "completion": {...}, "lmeval": {...}}``. A convention holds
        ``shortened`` (the context lost its beginning to fit the model), ``divisors`` (tokens or
        characters of the endings), and ``one_shot`` and ``served``, each with ``scores`` (the
        summed log-likelihoods in nats), ``prediction`` (the largest) and ``prediction_norm``
        (the largest after division).
    """
    block_size = model.config.block_size
    questions = [
        make_question(item, CONVENTIONS[name], tokenizer, block_size)
        for name in conventions
        for item in items
    ]
    scores = {"one_shot": _score_questions(model, questions, None, on_progress)}
    if serving is not None:
        scores["served"] = _score_questions(model, questions, serving, on_progress)
    records: list[dict[str, Any]] = [{"ind": item.ind, "label": item.label} for item in items]
    keys = [(record, name) for name in conventions for record in records]
    for i, ((record, name), question) in enumerate(zip(keys, questions, strict=True)):
        predictions = {mode: _predict(scores[mode][i], question.divisors) for mode in scores}
        shortened = {"shortened": question.is_shortened, "divisors": question.divisors}
        record[name] = shortened | predictions
    return records


def _score_questions(
    model: GPT,
    questions: Sequence[Question],
    serving: ServingConfig | None,
    on_progress: OnCount,
) -> list[list[float]]:
    """Return the summed log-likelihoods of each question's endings."""
    groups = [group for question in questions for group in question.groups]
    scores = iter(score_continuations(model, groups, serving, on_progress))
    return [[-score.nats for _ in q.groups for score in next(scores)] for q in questions]


def _predict(scores: list[float], divisors: list[int]) -> dict[str, Any]:
    normed = [
        score / divisor if divisor else -math.inf  # as in lm-eval: never select an empty ending
        for score, divisor in zip(scores, divisors, strict=True)
    ]
    return {
        "scores": scores,
        "prediction": scores.index(max(scores)),
        "prediction_norm": normed.index(max(normed)),
    }


def hellaswag_measurements(records: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """Return shares of correct predictions by the names of `kvlab.store.metrics`."""
    count = len(records)
    shortened = sum(any(record[name]["shortened"] for name in CONVENTIONS) for record in records)
    measurements: dict[str, float | int] = {
        "hellaswag_items": count,
        "hellaswag_shortened": shortened,
    }
    for name, convention in CONVENTIONS.items():
        for mode, suffix in (("one_shot", ""), ("served", "_served")):
            if mode not in records[0][name]:
                continue
            for key, accuracy in (("prediction", "acc"), ("prediction_norm", "acc_norm")):
                correct = sum(record[name][mode][key] == record["label"] for record in records)
                measurements[f"{convention.metric_prefix}_{accuracy}{suffix}"] = correct / count
    if count > 1:
        for metric in ("hellaswag_acc", "hellaswag_acc_norm"):
            error = binomial_standard_error(float(measurements[metric]), count)
            measurements[f"{metric}_stderr"] = error
    return measurements


def binomial_standard_error(share: float, count: int) -> float:
    """Return the standard error of a share of ``count`` independent items, 2 or more."""
    return math.sqrt(share * (1 - share) / (count - 1))
