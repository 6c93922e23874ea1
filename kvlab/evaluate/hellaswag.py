"""HellaSwag (arXiv 1905.07830): which of four endings is the most likely by the model?

Every item is scored in the two conventions in use, one-shot and optionally through the serving
cache. Their results differ by percentage points.

- ``completion``: the context is ``ctx``, as in the GPT-2 reproductions. ``acc_norm`` divides the
  log-likelihood of an ending by its tokens.
- ``lmeval``: EleutherAI's harness. The context is the activity label and the context in
  capitalized sentences, and text in brackets is stripped. ``acc_norm`` divides by the characters
  of the ending.

The record of each item is kept: comparing two models item by item detects smaller differences than
comparing two percentages.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from kvlab.data.hellaswag_dataset import HellaSwagItem
from kvlab.data.tokenizers import Tokenizer
from kvlab.evaluate.forward_passes import SILENT, Part
from kvlab.evaluate.scoring import Continuations, fit_to_block, score_continuations
from kvlab.model import GPT
from kvlab.spec import ServingConfig

CONVENTIONS = {"completion": "hellaswag", "lmeval": "hellaswag_lmeval"}
"""Convention -> prefix of its metrics' names."""


def score_hellaswag(
    model: GPT,
    items: Sequence[HellaSwagItem],
    tokenizer: Tokenizer,
    serving: ServingConfig | None = None,
    part: Part = SILENT,
) -> list[dict[str, Any]]:
    """Return one record per item, in their order.

    Args:
        serving: score a second time, token by token through this cache. None: do not.
        part: advanced by the endings that are newly scored. In total there are items x 4 endings
            x conventions x scoring modes.

    Returns:
        ``{"ind", "label", "completion": {...}, "lmeval": {...}}``. A convention holds
        ``shortened`` (the context lost its beginning to fit the model), ``divisors`` (tokens or
        characters of the endings), and ``one_shot`` and ``served``, each with ``scores`` (the
        summed log-likelihoods in nats), ``prediction`` (the largest) and ``prediction_norm``
        (the largest after division).
    """
    block_size = model.config.block_size
    questions = [
        _make_question(item, name, tokenizer, block_size) for name in CONVENTIONS for item in items
    ]
    groups = [group for own, _, _ in questions for group in own]
    scores = {"one_shot": iter(score_continuations(model, groups, None, part))}
    if serving is not None:
        scores["served"] = iter(score_continuations(model, groups, serving, part))
    records: list[dict[str, Any]] = [{"ind": item.ind, "label": item.label} for item in items]
    keys = [(record, name) for name in CONVENTIONS for record in records]
    for (record, name), (own, divisors, is_shortened) in zip(keys, questions, strict=True):
        record[name] = {"shortened": is_shortened, "divisors": divisors}
        for mode, by_group in scores.items():
            nats = [score.nats for _ in own for score in next(by_group)]
            record[name][mode] = _predict([-one for one in nats], divisors)
    return records


def _make_question(
    item: HellaSwagItem, convention: str, tokenizer: Tokenizer, block_size: int
) -> tuple[list[Continuations], list[float], bool]:
    """Encode an item. What does not fit is cut from the left of the context.

    Returns:
        One group, or one for each ending if the context was cut; tokens or characters of each
        ending, of one that is cut itself its scored part; whether anything was cut.
    """
    if convention == "lmeval":
        text = _strip_markup(f"{item.activity_label}: {item.ctx_a} {item.ctx_b.capitalize()}")
        endings = [_strip_markup(ending) for ending in item.endings]
        # an ending's tokens are those of the whole text beyond the context's, and white space at
        # the end of the context belongs to the ending
        context = tokenizer.encode(text.rstrip())
        encoded = [tokenizer.encode(f"{text} {one}")[len(context) :] for one in endings]
        divisors = [len(ending) for ending in endings]
    else:
        context = tokenizer.encode(item.ctx)
        encoded = [tokenizer.encode(f" {ending}") for ending in item.endings]
        divisors = [len(ids) for ids in encoded]
    context = context or [tokenizer.end_of_text]
    fitted = [fit_to_block(context, ending, block_size) for ending in encoded]
    if all(one == context for one, _ in fitted):
        return [Continuations(context, encoded)], [*divisors], False
    shares = [len(own) / max(1, len(ids)) for (_, own), ids in zip(fitted, encoded, strict=True)]
    scored = [share * size for share, size in zip(shares, divisors, strict=True)]
    return [Continuations(one, [ending]) for one, ending in fitted], scored, True


def _strip_markup(text: str) -> str:
    """Remove the markup of the WikiHow items, as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _predict(scores: list[float], divisors: list[float]) -> dict[str, Any]:
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
    measurements: dict[str, float | int]
    measurements = {"hellaswag_items": count, "hellaswag_shortened": shortened}
    for name, prefix in CONVENTIONS.items():
        for mode, suffix in (("one_shot", ""), ("served", "_served")):
            if mode not in records[0][name]:
                continue
            for key, accuracy in (("prediction", "acc"), ("prediction_norm", "acc_norm")):
                correct = sum(record[name][mode][key] == record["label"] for record in records)
                measurements[f"{prefix}_{accuracy}{suffix}"] = correct / count
    if count > 1:
        for metric in ("hellaswag_acc", "hellaswag_acc_norm"):
            variance = measurements[metric] * (1 - measurements[metric])
            measurements[f"{metric}_stderr"] = math.sqrt(variance / (count - 1))
    return measurements
