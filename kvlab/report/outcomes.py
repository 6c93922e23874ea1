"""HellaSwag outcomes, item by item, of a whole cell: read once, one bit an item."""

from kvlab.report.rows import Levels, TrialRow
from kvlab.report.statistics.items import ItemComparison, compare_items
from kvlab.report.study import Study

STYLES = ("hellaswag_acc_norm", "hellaswag_acc_norm_served")
"""The outcomes that cells are compared by: one-shot and through the serving cache."""

MOST_ITEMS = 2_000_000
"""Of all trials together; with more, cells are not compared item by item: it takes minutes."""

_WAYS = {"hellaswag_acc_norm": "one_shot", "hellaswag_acc_norm_served": "served"}
"""Where an item's record keeps each, under ``completion``."""

Bits = dict[str, dict[str, bytes]]
"""style -> trial -> one byte an item, 0 or 1."""


def read_outcomes(study: Study) -> Bits:
    """Every done trial's outcomes, in item order; trials without items are left out."""
    bits: Bits = {style: {} for style in STYLES}
    if too_many(study):
        return bits
    for row in study.done:
        if row.trial in bits[STYLES[0]]:
            continue
        for style, outcomes in _trial(study, row).items():
            bits[style][row.trial] = outcomes
    return bits


def too_many(study: Study) -> bool:
    """Whether there are more items than `read_outcomes` reads."""
    trials = {row.trial: row.measurements.get("hellaswag_items", 0) for row in study.done}
    return sum(trials.values()) > MOST_ITEMS


def _trial(study: Study, row: TrialRow) -> dict[str, bytes]:
    found: dict[str, bytearray] = {style: bytearray() for style in STYLES}
    for item in study.items(row):
        for style, way in _WAYS.items():
            if way in item["completion"]:
                found[style].append(item["completion"][way]["prediction_norm"] == item["label"])
    return {style: bytes(outcomes) for style, outcomes in found.items() if outcomes}


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
