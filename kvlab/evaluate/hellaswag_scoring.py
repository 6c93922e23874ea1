"""HellaSwag (arXiv 1905.07830): which of four endings does the model find likeliest?

Every item is scored in two conventions (see `kvlab.evaluate.hellaswag_prompts`), one-shot and, if
asked, through the serving cache. Records of items are kept, so that two models can be compared
item by item, which sees differences that two percentages do not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.data import HellaSwagItem, Tokenizer
from kvlab.evaluate.hellaswag_prompts import CONVENTIONS, Question, make_question
from kvlab.evaluate.scoring import score_continuations
from kvlab.model import GPT
from kvlab.spec import ServingConfig

METRIC_PREFIXES = {"completion": "hellaswag", "lmeval": "hellaswag_lmeval"}
"""What the conventions' metrics are called."""


def score_hellaswag(
    model: GPT,
    items: Sequence[HellaSwagItem],
    tokenizer: Tokenizer,
    serving: ServingConfig | None,
    tick: Callable[[int], None],
) -> list[dict[str, Any]]:
    """One record an item, in their order.

    Args:
        serving: how to score a second time, token by token through that cache; None: do not.
        tick: called now and then with the number of endings that are newly scored; there are
            items x 4 endings x conventions x ways of scoring.

    Returns:
        ``{"ind", "label", "completion": {...}, "lmeval": {...}}``; a convention holds
        ``shortened`` (the context lost its beginning to fit the model), ``divisors`` (tokens or
        characters of the endings) and ``one_shot`` and ``served``: each with ``scores`` (the
        summed log-likelihoods in nats), ``prediction`` (the largest) and ``prediction_norm``
        (the largest after division).
    """
    return score_items(model, items, tokenizer, tuple(CONVENTIONS), serving, tick)


def score_items(
    model: GPT,
    items: Sequence[HellaSwagItem],
    tokenizer: Tokenizer,
    conventions: Sequence[str],
    serving: ServingConfig | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """`score_hellaswag` in some of the `CONVENTIONS`."""
    paths: dict[str, ServingConfig | None] = {"one_shot": None}
    if serving is not None:
        paths["served"] = serving
    block = model.config.block_size
    questions = [
        make_question(CONVENTIONS[name](item), tokenizer, block)
        for name in conventions
        for item in items
    ]
    scores = {name: _question_scores(model, questions, path, tick) for name, path in paths.items()}
    records: list[dict[str, Any]] = [{"ind": item.ind, "label": item.label} for item in items]
    places = [(record, name) for name in conventions for record in records]
    for i, ((record, name), question) in enumerate(zip(places, questions, strict=True)):
        divisors = question.characters if name == "lmeval" else question.tokens
        found = {way: _predictions(scores[way][i], divisors) for way in paths}
        record[name] = {"shortened": question.is_shortened, "divisors": divisors, **found}
    return records


def _question_scores(
    model: GPT,
    questions: Sequence[Question],
    serving: ServingConfig | None,
    tick: Callable[[int], None],
) -> list[list[float]]:
    """Summed log-likelihoods of each question's endings."""
    branches = [branch for question in questions for branch in question.branches]
    scores = iter(score_continuations(model, branches, serving, tick))
    return [[-score.nats for _ in q.branches for score in next(scores)] for q in questions]


def _predictions(scores: list[float], divisors: list[int]) -> dict[str, Any]:
    normed = [
        score / divisor if divisor else -math.inf  # as lm-eval: an empty ending is never chosen
        for score, divisor in zip(scores, divisors, strict=True)
    ]
    return {
        "scores": scores,
        "prediction": scores.index(max(scores)),
        "prediction_norm": normed.index(max(normed)),
    }


def hellaswag_measurements(records: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """Shares of right predictions by the names of `kvlab.store.metrics`, from item records."""
    count = len(records)
    shortened = sum(
        any(record[name]["shortened"] for name in METRIC_PREFIXES) for record in records
    )
    found: dict[str, float | int] = {"hellaswag_items": count, "hellaswag_shortened": shortened}
    for convention, prefix in METRIC_PREFIXES.items():
        for way in (way for way in ("one_shot", "served") if way in records[0][convention]):
            ending = "" if way == "one_shot" else "_served"
            for key, name in (("prediction", "acc"), ("prediction_norm", "acc_norm")):
                right = sum(r[convention][way][key] == r["label"] for r in records)
                found[f"{prefix}_{name}{ending}"] = right / count
    if count > 1:
        for name in ("hellaswag_acc", "hellaswag_acc_norm"):
            found[f"{name}_stderr"] = standard_error(float(found[name]), count)
    return found


def standard_error(share: float, count: int) -> float:
    """Standard error of a share of ``count`` independent items, 2 or more."""
    return math.sqrt(share * (1 - share) / (count - 1))
