"""A `Study`: one sweep's rows with the design's structure, which every section reads from."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from kvlab.report.effects import ALPHA, Effect, estimate_interactions, estimate_main_effects
from kvlab.report.statistics import Estimate, estimate, holm_correction
from kvlab.report.trial_rows import Levels, TrialRow, read_rows
from kvlab.store import Store
from kvlab.store.metrics import METRICS

BASELINE_LABEL = "baseline"
"""What the baseline cell is called."""

GAP_ROUNDING = 1e-4
"""Nats per token: a serving gap below it is the rounding of float32, not the cache."""


class Study:
    """One sweep, read from its record.

    Attributes:
        sweep: the frozen description, as `sweep.json` holds it.
        factors: factor -> levels, the baseline's first.
        baseline: the baseline cell.
        rows: one a cell and seed, in the design's order.
        cells: cell -> its rows by seed, in the design's order.
    """

    def __init__(self, store: Store, sweep: Mapping[str, Any], rows: list[TrialRow]):
        self._store = store
        self.sweep = sweep
        self.factors = {name: tuple(levels) for name, levels in sweep["factors"].items()}
        self.baseline: Levels = tuple(sweep["baseline"][factor] for factor in self.factors)
        self.rows = rows
        self.cells: dict[Levels, dict[int, TrialRow]] = {}
        for row in rows:
            self.cells.setdefault(row.levels, {})[row.seed] = row
        self._effects: dict[str, list[Effect]] = {}
        self._interactions: dict[str, list[Effect]] = {}

    @classmethod
    def load(cls, store: Store, name: str) -> "Study":
        """Reads a sweep's record.

        Raises:
            UsageError: the store has no such sweep.
            StoreError: its description is damaged.
        """
        sweep = store.sweep(name)
        return cls(store, sweep, read_rows(store, sweep))

    @property
    def name(self) -> str:
        return str(self.sweep["name"])

    @cached_property
    def sections(self) -> tuple[str, ...] | None:
        """The sections that the sweep asks for, in order; None for all."""
        asked = (self.sweep.get("report") or {}).get("sections")
        return tuple(asked) if asked else None

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({row.seed for row in self.rows}))

    @cached_property
    def done(self) -> tuple[TrialRow, ...]:
        return tuple(row for row in self.rows if row.done)

    @cached_property
    def untrained(self) -> bool:
        """Whether all weights are as drawn, so that no loss means anything."""
        asked = [row.facts["experiment"].get("training", {}) for row in self.done]
        drawn = (one.get("tokens") == 0 and one.get("init_from") is None for one in asked)
        return bool(asked) and all(drawn)

    @cached_property
    def states(self) -> Counter[str]:
        """Rows by status."""
        return Counter(row.status for row in self.rows)

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """The metrics that any trial has, in the order of the table of metrics."""
        found = {name for row in self.done for name in row.measurements}
        return tuple(name for name in METRICS if name in found)

    @cached_property
    def primary(self) -> str:
        """The quality metric that conclusions are drawn from.

        The loss through the serving cache, since one-shot scoring cannot see what serving does
        to quality; and bits per byte where cells differ in tokenizer, since their losses count
        different tokens.
        """
        served = "_served" if "loss_served" in self.measured else ""
        same_tokens = len(self.tokenizers) <= 1
        return ("loss" if same_tokens else "bits_per_byte") + served

    @cached_property
    def one_shot(self) -> str:
        """The one-shot form of `primary`."""
        return self.primary.removesuffix("_served")

    @cached_property
    def tokenizers(self) -> frozenset[str]:
        return frozenset(str(row.facts["experiment"]["data"]["tokenizer"]) for row in self.done)

    def values(self, levels: Levels, metric: str) -> dict[int, float]:
        """A cell's values of one metric by seed; only of trials that are done and have it."""
        return {
            seed: row.measurements[metric]
            for seed, row in self.cells.get(levels, {}).items()
            if row.done and metric in row.measurements
        }

    def mean(self, levels: Levels, metric: str) -> float | None:
        values = self.values(levels, metric)
        return sum(values.values()) / len(values) if values else None

    def means(self, metric: str) -> dict[Levels, float]:
        """Cell -> mean over its seeds, for the cells that have the metric."""
        found = ((levels, self.mean(levels, metric)) for levels in self.cells)
        return {levels: mean for levels, mean in found if mean is not None}

    def kv_bytes(self, levels: Levels) -> int | None:
        """Exact bytes that one sequence's cache holds at block size; the same at every seed."""
        for row in self.cells.get(levels, {}).values():
            if "kv" in row.facts:
                return int(row.facts["kv"]["bytes_at_block_size"])
        return None

    def block_size(self, levels: Levels) -> int | None:
        """Tokens of a cell's longest sequence; the same at every seed."""
        for row in self.cells.get(levels, {}).values():
            block = row.facts.get("experiment", {}).get("model", {}).get("block_size")
            if block:
                return int(block)
        return None

    def parameters(self, levels: Levels) -> int | None:
        """Parameters of a cell's model; the same at every seed."""
        for row in self.cells.get(levels, {}).values():
            if "model" in row.facts:
                return int(row.facts["model"]["parameters"])
        return None

    def paired(self, levels: Levels, other: Levels, metric: str) -> Estimate | None:
        """The mean over shared seeds of a cell's value minus another's; None if none is shared."""
        mine, theirs = self.values(levels, metric), self.values(other, metric)
        seeds = sorted(mine.keys() & theirs.keys())
        if not seeds:
            return None
        scale = max(abs(mine[seed]) for seed in seeds)
        differences = [mine[seed] - theirs[seed] for seed in seeds]
        return estimate(differences, scale, in_steps=METRICS[metric].in_steps)

    @cached_property
    def called_cells(self) -> frozenset[Levels]:
        """Cells told apart from the baseline in `primary`, corrected for all cells: whichever
        of them a sentence picks, it is right about."""
        return significant_cells(
            {c: self.paired(c, self.baseline, self.primary) for c in self.cells}
        )

    @cached_property
    def gaps(self) -> dict[Levels, Estimate]:
        """Every cell's serving gap over its seeds."""
        found = {levels: self.values(levels, "serving_gap") for levels in self.cells}
        losses = {levels: self.mean(levels, "loss") or 1.0 for levels in found}
        return {c: estimate(list(gaps.values()), losses[c]) for c, gaps in found.items() if gaps}

    @cached_property
    def called_gaps(self) -> frozenset[Levels]:
        """Cells whose serving gap is told apart from none, corrected for all cells."""
        return significant_cells(self.gaps)

    def effects(self, metric: str) -> list[Effect]:
        """Every level's difference from its factor's baseline level, corrected together."""
        if metric not in self._effects:
            self._effects[metric] = estimate_main_effects(self.cells, self.factors, metric)
        return self._effects[metric]

    def interactions(self, metric: str) -> list[Effect]:
        """Every pair of levels: what both together do beyond the sum of each alone."""
        if metric not in self._interactions:
            self._interactions[metric] = estimate_interactions(self.cells, self.factors, metric)
        return self._interactions[metric]

    @cached_property
    def _ambiguous(self) -> frozenset[str]:
        """Level names that several factors use."""
        counts = Counter(level for levels in self.factors.values() for level in levels)
        return frozenset(level for level, count in counts.items() if count > 1)

    def label(self, levels: Levels) -> str:
        """A cell's short name: the levels that differ from the baseline, joined by ``+``."""
        changed = [
            f"{factor}={level}" if level in self._ambiguous else level
            for factor, level, base in zip(self.factors, levels, self.baseline, strict=True)
            if level != base
        ]
        return "+".join(changed) or BASELINE_LABEL

    def key(self, levels: Levels) -> str:
        """A cell's number in the design, as figures and tables refer to it."""
        return f"c{self._places[levels]}"

    def place(self, levels: Levels) -> int:
        """A cell's place in the design's order."""
        return self._places[levels]

    @cached_property
    def _places(self) -> dict[Levels, int]:
        return {levels: number for number, levels in enumerate(self.cells)}

    def items_text(self, row: TrialRow) -> bytes:
        """A trial's HellaSwag outcomes, one JSON object a line; empty if it has none."""
        return self._store.items_text(row.trial)

    def change_key(self, change: Iterable[tuple[str, str]]) -> str:
        """What rows and marks of these levels are selected by: the cell that differs from the
        baseline in them alone, or a key of their own where the design does not have it."""
        new = dict(change)
        pairs = zip(self.factors, self.baseline, strict=True)
        levels = tuple(new.get(factor, base) for factor, base in pairs)
        named = "+".join(f"{factor}={level}" for factor, level in new.items())
        return self.key(levels) if levels in self._places else named


def significant_cells(found: Mapping[Levels, Estimate | None]) -> frozenset[Levels]:
    """Cells whose difference is called, Holm-corrected for all that are tested."""
    tested = {levels: each for levels, each in found.items() if each and each.kind == "tested"}
    corrected = holm_correction([each.p for each in tested.values()])
    called = {levels for levels, p in zip(tested, corrected, strict=True) if p < ALPHA}
    return frozenset(called | {c for c, each in found.items() if each and each.kind == "exact"})
