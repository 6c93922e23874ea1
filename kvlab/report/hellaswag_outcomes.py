"""HellaSwag outcomes, item by item, of every trial: each file read once, one byte an item."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import eq
from typing import Any

from kvlab.errors import StoreError
from kvlab.report.statistics import ItemComparison, compare_items
from kvlab.report.study import Study
from kvlab.report.trial_rows import Levels, TrialRow

STYLES = ("hellaswag_acc_norm", "hellaswag_acc_norm_served")
"""The outcomes that cells are compared by: one-shot and through the serving cache."""

MAX_ITEMS = 50_000_000
"""Of all trials together; with more, cells are not compared item by item: it takes minutes.
Ten million, as 1,000 trials of all items have, take about one."""

_SCORING_KEYS = {"hellaswag_acc_norm": "one_shot", "hellaswag_acc_norm_served": "served"}
"""Where an item's record keeps each, under ``completion``."""

Outcomes = dict[str, dict[str, bytes]]
"""style -> trial -> one byte an item, 0 or 1."""


def read_outcomes(study: Study) -> Outcomes:
    """Every done trial's outcomes, in item order; trials without items are left out."""
    bits: Outcomes = {style: {} for style in STYLES}
    if exceeds_item_limit(study):
        return bits
    rows = list({row.trial: row for row in study.done}.values())

    def read(row: TrialRow) -> Mapping[str, bytes]:
        try:
            return parse_outcomes(study.items_text(row))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"items.jsonl.gz of trial {row.trial} does not hold outcomes ({error!r})"
            raise StoreError(f"{text}; move its result.json away, submit again") from None

    with ThreadPoolExecutor() as pool:  # most of the time is unpacking, beside Python's lock
        for row, found in zip(rows, pool.map(read, rows), strict=True):
            for style, outcomes in found.items():
                bits[style][row.trial] = outcomes
    return bits


def exceeds_item_limit(study: Study) -> bool:
    """Whether there are more items than `read_outcomes` reads."""
    trials = {row.trial: row.measurements.get("hellaswag_items", 0) for row in study.done}
    return sum(trials.values()) > MAX_ITEMS


def parse_outcomes(text: bytes) -> dict[str, bytes]:
    """Whether each item was right, by style, from lines as `Store.write_items` makes them.

    Lines that are made as the first one are read by a pattern of it, in a tenth of the time that
    decoding every line takes; if any is not, they are decoded one by one.
    """
    lines = text.splitlines()
    if not lines:
        return {}
    names = _SCORING_KEYS.values()
    pattern, columns = _line_pattern(json.loads(lines[0]))
    found = re.findall(pattern, text)
    if len(found) == len(lines):
        by_name = dict(zip(columns, zip(*found, strict=True), strict=True))
        labels = by_name[("label",)]
        right = {
            way: bytes(map(eq, by_name["completion", way, "prediction_norm"], labels))
            for way in names
            if ("completion", way, "prediction_norm") in by_name
        }
    else:
        right = {way: bytes(_decode_items(map(json.loads, lines), way)) for way in names}
    return {style: right[way] for style, way in _SCORING_KEYS.items() if right.get(way)}


def _decode_items(items: Iterable[Mapping[str, Any]], way: str) -> Iterator[bool]:
    for item in items:
        if way in item["completion"]:
            yield item["completion"][way]["prediction_norm"] == item["label"]


_DIGIT_FIELDS = ("label", "prediction_norm")
"""What is read of an item: single digits."""


def _line_pattern(item: Mapping[str, Any]) -> tuple[bytes, list[tuple[str, ...]]]:
    """Of whole lines with the same keys in the same order, as `json.dumps` writes them; and
    where its groups stand in an item. Texts match nothing: they may hold anything."""
    groups: list[tuple[str, ...]] = []

    def of(value: Any, path: tuple[str, ...]) -> str:
        if isinstance(value, Mapping):
            inside = (f"{re.escape(json.dumps(k))}: {of(v, (*path, k))}" for k, v in value.items())
            return r"\{" + ", ".join(inside) + r"\}"
        if path[-1] in _DIGIT_FIELDS:
            groups.append(path)
            return r"(\d)"
        return r"\[[^][{}\"]*\]" if isinstance(value, list) else r'[^][{}",\n]+'

    return f"(?m)^{of(item, ())}$".encode(), groups


def compare_with_baseline(
    study: Study, bits: Outcomes, style: str, levels: Levels
) -> ItemComparison | None:
    """A cell against the baseline at every seed that both have on the same items."""
    pairs = []
    for seed, row in study.cells[levels].items():
        base = study.cells[study.baseline].get(seed)
        if base is None:
            continue
        one, other = bits[style].get(base.trial), bits[style].get(row.trial)
        if one and other and len(one) == len(other):
            pairs.append((one, other))
    sizes = {len(one) for one, _ in pairs}
    return compare_items(pairs) if len(sizes) == 1 else None


# HellaSwag accuracies of cells, with the error that a finite number of items leaves.


CHANCE = 0.25
CHANCE_ERRORS = 2.0
"""Standard errors above chance from which an accuracy is taken to be above it."""


def accuracy_error(study: Study, levels: Levels, metric: str) -> float | None:
    """Standard error over items of a cell's mean accuracy, as a share; None without items.

    Of one seed's items: seeds answer the same ones, so more seeds make it no smaller.
    """
    mean = study.mean(levels, metric)
    items = max(study.values(levels, "hellaswag_items").values(), default=0)
    if mean is None or items < 2:
        return None
    return float((max(0.0, mean * (1 - mean)) / (items - 1)) ** 0.5)


def largest_accuracy_error(study: Study, metrics: Iterable[str]) -> float | None:
    """Of all cells in these metrics."""
    found = (accuracy_error(study, levels, m) for m in metrics for levels in study.cells)
    return max((error for error in found if error is not None), default=None)


def all_at_chance(study: Study, metrics: Iterable[str]) -> bool:
    """Whether no cell's accuracy is above chance by more than `ERRORS` of its errors."""
    known = [
        mean <= CHANCE + CHANCE_ERRORS * (accuracy_error(study, levels, metric) or 0.0)
        for metric in metrics
        for levels, mean in study.means(metric).items()
    ]
    return bool(known) and all(known)
