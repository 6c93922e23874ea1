"""HellaSwag outcomes item by item, and the error of accuracies over a finite number of items.

Each trial's items are read once, as one byte per item.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import eq
from typing import Any

from kvlab.analysis.statistics import ItemComparison, compare_items
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.errors import StoreError

_SCORING_KEYS = {"hellaswag_acc_norm": "one_shot", "hellaswag_acc_norm_served": "served"}
"""Metric -> the key of its prediction under an item's ``completion``."""

COMPARED_METRICS = tuple(_SCORING_KEYS)
"""The metrics that cells are compared in: one-shot and through the serving cache."""

MAX_ITEMS = 50_000_000
"""Items of all trials together, above which cells are not compared: it would take minutes."""

CHANCE = 0.25
CHANCE_ERRORS = 2.0
"""Standard errors by which an accuracy must exceed `CHANCE` to count as above it."""

Outcomes = dict[str, dict[str, bytes]]
"""Metric -> trial -> one byte per item, 0 or 1."""


def read_outcomes(study: Study) -> Outcomes:
    """Read the outcomes of every trial that is done, in item order.

    Trials without items are left out; if there are more than `MAX_ITEMS`, all are.

    Raises:
        StoreError: A trial's items are damaged.
    """
    outcomes: Outcomes = {metric: {} for metric in COMPARED_METRICS}
    if exceeds_item_limit(study):
        return outcomes
    rows = list({row.trial: row for row in study.done_rows}.values())

    def read(row: TrialRow) -> Mapping[str, bytes]:
        try:
            return parse_outcomes(study.read_items(row))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"items.jsonl.gz of trial {row.trial} does not hold outcomes ({error!r})"
            raise StoreError(f"{text}; move its result.json away, submit again") from None

    with ThreadPoolExecutor() as pool:  # decompression, most of the work, releases the GIL
        for row, by_metric in zip(rows, pool.map(read, rows), strict=True):
            for metric, of_trial in by_metric.items():
                outcomes[metric][row.trial] = of_trial
    return outcomes


def exceeds_item_limit(study: Study) -> bool:
    """Whether the trials have more items than `read_outcomes` reads."""
    counts = {row.trial: row.measurements.get("hellaswag_items", 0) for row in study.done_rows}
    return sum(counts.values()) > MAX_ITEMS


def parse_outcomes(text: bytes) -> dict[str, bytes]:
    """Parse whether each item was answered correctly.

    Lines with the same keys in the same order as the first one are read by a regular expression,
    in a tenth of the time of decoding JSON. If any line differs, all are decoded.

    Args:
        text: Lines as `Store.write_details` writes them.

    Returns:
        Metric -> one byte per item.
    """
    lines = text.splitlines()
    if not lines:
        return {}
    keys = _SCORING_KEYS.values()
    pattern, paths = _line_pattern(json.loads(lines[0]))
    matches = re.findall(pattern, text)
    if len(matches) == len(lines):
        columns = dict(zip(paths, zip(*matches, strict=True), strict=True))
        labels = columns[("label",)]
        correct = {
            key: bytes(map(eq, columns["completion", key, "prediction_norm"], labels))
            for key in keys
            if ("completion", key, "prediction_norm") in columns
        }
    else:
        correct = {key: bytes(_decode_items(map(json.loads, lines), key)) for key in keys}
    return {metric: correct[key] for metric, key in _SCORING_KEYS.items() if correct.get(key)}


def _decode_items(items: Iterable[Mapping[str, Any]], key: str) -> Iterator[bool]:
    for item in items:
        if key in item["completion"]:
            yield item["completion"][key]["prediction_norm"] == item["label"]


_DIGIT_FIELDS = ("label", "prediction_norm")
"""The fields that are read from an item: single digits."""


def _line_pattern(item: Mapping[str, Any]) -> tuple[bytes, list[tuple[str, ...]]]:
    """Return a pattern of lines with an item's keys, and the path of each of its groups.

    It matches lines as `json.dumps` writes them. String values match nothing, since they may
    contain anything.
    """
    groups: list[tuple[str, ...]] = []

    def value_pattern(value: Any, path: tuple[str, ...]) -> str:
        if isinstance(value, Mapping):
            entries = (
                f"{re.escape(json.dumps(k))}: {value_pattern(v, (*path, k))}"
                for k, v in value.items()
            )
            return r"\{" + ", ".join(entries) + r"\}"
        if path[-1] in _DIGIT_FIELDS:
            groups.append(path)
            return r"(\d)"
        return r"\[[^][{}\"]*\]" if isinstance(value, list) else r'[^][{}",\n]+'

    return f"(?m)^{value_pattern(item, ())}$".encode(), groups


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


def largest_accuracy_error(study: Study, metrics: Iterable[str]) -> float | None:
    errors = (accuracy_error(study, levels, m) for m in metrics for levels in study.cells)
    return max((error for error in errors if error is not None), default=None)


def all_at_chance(study: Study, metrics: Iterable[str]) -> bool:
    """Whether no cell's accuracy exceeds chance by more than `CHANCE_ERRORS` of its errors."""
    at_chance = [
        mean <= CHANCE + CHANCE_ERRORS * (accuracy_error(study, levels, metric) or 0.0)
        for metric in metrics
        for levels, mean in study.means(metric).items()
    ]
    return bool(at_chance) and all(at_chance)
