"""HellaSwag outcomes item by item, and the error of accuracies over a finite number of items.

Each trial's items are read once, as one byte per item.
"""

import math
import re
from collections.abc import Iterable

from kvlab.analysis.statistics import ItemComparison, compare_items
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels

_SCORING_KEYS = {"hellaswag_acc_norm": "one_shot", "hellaswag_acc_norm_served": "served"}
"""Metric -> the key of its prediction under an item's ``completion``."""

COMPARED_METRICS = tuple(_SCORING_KEYS)
"""The metrics that cells are compared in: one-shot and through the serving cache."""

CHANCE = 0.25
CHANCE_ERRORS = 2.0
"""Standard errors by which an accuracy must exceed `CHANCE` to count as above it."""

Outcomes = dict[str, dict[str, bytes]]
"""Metric -> trial -> one byte per item, 0 or 1."""


def read_outcomes(study: Study) -> Outcomes:
    """Read the outcomes of every trial that is done, in item order.

    Trials without items are left out.

    Raises:
        ValueError: A trial's items are not as the evaluation writes them.
    """
    outcomes: Outcomes = {metric: {} for metric in COMPARED_METRICS}
    for trial in dict.fromkeys(row.trial for row in study.done_rows):
        for metric, of_trial in parse_outcomes(study.store.items_text(trial)).items():
            outcomes[metric][trial] = of_trial
    return outcomes


_SCORED = rb'(?:, "%s": \{"scores": \[[^\]]*\], "prediction": \d, "prediction_norm": (\d)\})?'
_LINE = re.compile(
    rb'^\{"ind": \d+, "label": (\d), "completion": \{"shortened": \w+, "divisors": \[[^\]]*\]'
    + b"".join(_SCORED % key.encode() for key in _SCORING_KEYS.values())
    + rb"\}(?:, \"lmeval\": .*)?\}$",
    re.MULTILINE,
)
"""A line as the evaluation writes it: its label and the prediction of each key."""


def parse_outcomes(text: bytes) -> dict[str, bytes]:
    """Parse whether each item was answered correctly, in a twentieth of the time of decoding JSON.

    Args:
        text: Lines as `Store.write_details` writes them.

    Returns:
        Metric -> one byte per item.

    Raises:
        ValueError: A line is not as the evaluation writes it.
    """
    found = _LINE.findall(text)
    if len(found) != len(text.splitlines()):
        raise ValueError("a line is not as the evaluation writes it")
    outcomes: dict[str, bytes] = {}
    for column, metric in enumerate(_SCORING_KEYS, 1):
        correct = bytes(one[column] == one[0] for one in found if one[column])
        outcomes |= {metric: correct} if correct else {}
    return outcomes


def compare_with_baseline(
    study: Study, outcomes: Outcomes, metric: str, levels: Levels
) -> ItemComparison | None:
    """Compare a cell with the baseline at every seed at which both answered the same items.

    None if there is no such seed, or the number of items differs between seeds.
    """
    pairs = []
    for seed, row in study.cells[levels].items():
        base = study.cells[study.baseline].get(seed)
        if base is None:
            continue
        one, other = outcomes[metric].get(base.trial), outcomes[metric].get(row.trial)
        if one and other and len(one) == len(other):
            pairs.append((one, other))
    sizes = {len(one) for one, _ in pairs}
    return compare_items(pairs) if len(sizes) == 1 else None


def accuracy_error(study: Study, levels: Levels, metric: str) -> float | None:
    """Return the standard error over items of a cell's mean accuracy, as a share.

    It is that of one seed: seeds answer the same items, so more seeds do not reduce it. None
    without items.
    """
    mean = study.mean(levels, metric)
    items = max(study.values(levels, "hellaswag_items").values(), default=0)
    if mean is None or items < 2:
        return None
    return float(math.sqrt(max(0.0, mean * (1 - mean)) / (items - 1)))


def all_at_chance(study: Study, metrics: Iterable[str]) -> bool:
    """Whether no cell's accuracy exceeds chance by more than `CHANCE_ERRORS` of its errors."""
    at_chance = [
        mean <= CHANCE + CHANCE_ERRORS * (accuracy_error(study, levels, metric) or 0.0)
        for metric in metrics
        for levels, mean in study.means(metric).items()
    ]
    return bool(at_chance) and all(at_chance)
