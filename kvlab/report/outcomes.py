"""HellaSwag outcomes, item by item, of every trial: each file read once, one byte an item."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvlab.errors import StoreError
from kvlab.report.rows import Levels, TrialRow
from kvlab.report.statistics.items import ItemComparison, compare_items
from kvlab.report.study import Study

STYLES = ("hellaswag_acc_norm", "hellaswag_acc_norm_served")
"""The outcomes that cells are compared by: one-shot and through the serving cache."""

MOST_ITEMS = 50_000_000
"""Of all trials together; with more, cells are not compared item by item: it takes minutes.
Ten million, as 1,000 trials of all items have, take about one."""

_WAYS = {"hellaswag_acc_norm": "one_shot", "hellaswag_acc_norm_served": "served"}
"""Where an item's record keeps each, under ``completion``."""

Bits = dict[str, dict[str, bytes]]
"""style -> trial -> one byte an item, 0 or 1."""


def read_outcomes(study: Study) -> Bits:
    """Every done trial's outcomes, in item order; trials without items are left out."""
    bits: Bits = {style: {} for style in STYLES}
    if too_many(study):
        return bits
    rows = list({row.trial: row for row in study.done}.values())

    def read(row: TrialRow) -> Mapping[str, bytes]:
        try:
            return outcomes_of(study.items_text(row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"items.jsonl.gz of trial {row.trial} does not hold outcomes ({error!r})"
            raise StoreError(f"{text}; move its result.json away, submit again") from None

    with ThreadPoolExecutor() as pool:  # most of the time is unpacking, beside Python's lock
        for row, found in zip(rows, pool.map(read, rows), strict=True):
            for style, outcomes in found.items():
                bits[style][row.trial] = outcomes
    return bits


def too_many(study: Study) -> bool:
    """Whether there are more items than `read_outcomes` reads."""
    trials = {row.trial: row.measurements.get("hellaswag_items", 0) for row in study.done}
    return sum(trials.values()) > MOST_ITEMS


def outcomes_of(text: bytes) -> dict[str, bytes]:
    """Whether each item was right, by style, from lines as `Store.write_items` makes them."""
    first, _, _ = text.partition(b"\n")
    found = _alike(text, list(_predictions(json.loads(first)))) if first else {}
    if found is None:  # not all lines are made alike: one by one
        found = {way: bytearray() for way in _WAYS.values()}
        for line in text.splitlines():
            item = json.loads(line)
            for (part, way), prediction in _predictions(item).items():
                if part == "completion":
                    found[way].append(prediction == item["label"])
    return {style: bytes(found[way]) for style, way in _WAYS.items() if found.get(way)}


def _alike(text: bytes, order: list[tuple[str, str]]) -> dict[str, bytearray] | None:
    """The outcomes of lines that hold the same predictions in the same order.

    Labels and predictions are single digits, so they are where their names end; names cannot
    stand inside of other texts, where quotes are escaped. Decoding every line takes ten times
    as long.
    """
    items = text.count(b"\n")
    labels, found = _digits(text, b'"label": ', b","), _digits(text, b'"prediction_norm": ', b"}")
    if len(labels) != items or len(found) != items * len(order):
        return None
    if any(text.count(opening) != items * count for opening, count in _openings(order).items()):
        return None
    right: dict[str, bytearray] = {}
    for place, (part, way) in enumerate(order):
        if part == "completion":
            pairs = zip(found[place :: len(order)], labels, strict=True)
            right[way] = bytearray(one == label for one, label in pairs)
    return right


def _digits(text: bytes, name: bytes, end: bytes) -> bytes:
    """The digit behind each ``name``; none if one is not a single digit with ``end`` behind it."""
    pieces = b"".join([piece[:2] for piece in text.split(name)[1:]])
    digits, ends = pieces[::2], pieces[1::2]
    return digits if ends == end * len(digits) and (digits.isdigit() or not digits) else b""


def _openings(order: list[tuple[str, str]]) -> Counter[bytes]:
    """What stands before each prediction of a line in this order, and how often in a line."""
    found: Counter[str] = Counter()
    last = ""
    for part, way in order:
        name = f'"{way}": {{"scores"'
        found[f", {name}" if part == last else f', "{part}": {{{name}'] += 1
        last = part
    return Counter({opening.encode(): count for opening, count in found.items()})


def _predictions(item: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """(convention, way) -> the ending that is preferred, in the order of the line."""
    return dict(_listed(item))


def _listed(item: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], int]]:
    for part, ways in item.items():
        if isinstance(ways, Mapping):
            for way, scored in ways.items():
                yield (part, way), scored["prediction_norm"]


def against_baseline(study: Study, bits: Bits, style: str, levels: Levels) -> ItemComparison | None:
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
