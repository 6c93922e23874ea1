"""HellaSwag outcomes, item by item, of every trial: each file read once, one byte an item."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import eq
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
        except (ValueError, LookupError, TypeError, AttributeError) as error:
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
    """Whether each item was right, by style, from lines as `Store.write_items` makes them.

    Lines that are made as the first one are read by a pattern of it, in a tenth of the time that
    decoding every line takes; if any is not, they are decoded one by one.
    """
    lines = text.splitlines()
    if not lines:
        return {}
    names = _WAYS.values()
    pattern, columns = _pattern_of(json.loads(lines[0]))
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
        right = {way: bytes(_right(map(json.loads, lines), way)) for way in names}
    return {style: right[way] for style, way in _WAYS.items() if right.get(way)}


def _right(items: Iterable[Mapping[str, Any]], way: str) -> Iterator[bool]:
    for item in items:
        if way in item["completion"]:
            yield item["completion"][way]["prediction_norm"] == item["label"]


_TAKEN = ("label", "prediction_norm")
"""What is read of an item: single digits."""


def _pattern_of(item: Mapping[str, Any]) -> tuple[bytes, list[tuple[str, ...]]]:
    """Of whole lines with the same keys in the same order, as `json.dumps` writes them; and
    where its groups stand in an item. Texts match nothing: they may hold anything."""
    groups: list[tuple[str, ...]] = []

    def of(value: Any, path: tuple[str, ...]) -> str:
        if isinstance(value, Mapping):
            inside = (f"{re.escape(json.dumps(k))}: {of(v, (*path, k))}" for k, v in value.items())
            return r"\{" + ", ".join(inside) + r"\}"
        if path[-1] in _TAKEN:
            groups.append(path)
            return r"(\d)"
        return r"\[[^][{}\"]*\]" if isinstance(value, list) else r'[^][{}",\n]+'

    return f"(?m)^{of(item, ())}$".encode(), groups


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
