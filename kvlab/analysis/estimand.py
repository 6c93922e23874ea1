"""What is compared with what: cells that enter means over settings, and the reference of a cell.

A cell that is served otherwise than the baseline, such as one whose layers are tied at serving,
may be broken, and a mean over working and broken cells says nothing of either. So the effect of a
level that changes weights is the mean over the settings that are served as they were trained. A
level that changes serving is judged in each setting by itself, against the same weights served as
trained.

A level that saves nothing, such as rotary positions, makes every cell that has it look like a free
reduction. So a cell is compared with its *reference*: the cell that has its levels of all factors
that save nothing, and the baseline's level of all others.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from kvlab.analysis.matched_pairs import Change, Corners, Factors
from kvlab.analysis.trial_rows import Levels

NEUTRAL_SERVING = ("serving.compile",)
"""Keys of serving that change no logits beyond rounding."""

_STORAGE = ("kv_dtype", "kv_group", "kv_residual")
"""How K/V are stored: a training may read them so, too."""


@dataclass(frozen=True)
class Estimand:
    """The cells of one design, by what may be compared.

    Attributes:
        factors: Factor -> levels, the baseline's first.
        patches: Factor -> level -> what it sets, as dotted keys.
        kv_bytes: Bytes of every cell's cache, where they are known.
        kept: Factors whose levels a reference keeps, whatever they store.
        over: Factor -> levels whose settings enter a mean, where the sweep declares them.
        all_seeds: Whether means without pairs are over all seeds of each cell. Not where cells get
            seeds for what their first ones have shown.
    """

    cells: Sequence[Levels]
    factors: Factors
    patches: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    kv_bytes: Mapping[Levels, int] = field(default_factory=dict)
    kept: Collection[str] = ()
    over: Mapping[str, Sequence[str]] = field(default_factory=dict)
    all_seeds: bool = False

    @cached_property
    def baseline(self) -> Levels:
        return tuple(levels[0] for levels in self.factors.values())

    def _settings(self, levels: Levels, factors: Iterable[str]) -> dict[str, Any]:
        """Return all that the levels of some factors set."""
        named = dict(zip(self.factors, levels, strict=True))
        settings: dict[str, Any] = {}
        for factor in factors:
            settings |= self.patches.get(factor, {}).get(named[factor], {})
        return settings

    def is_served_otherwise(self, levels: Levels) -> bool:
        """Whether a cell's serving is neither the baseline's nor that of its own training.

        Levels of factors that `decide.over` names do not count: the sweep says what of them enters.
        """
        factors = [factor for factor in self.factors if factor not in self.over]
        own = self._settings(levels, factors)
        changed = _find_changed(own, self._settings(self.baseline, factors))
        for name in _STORAGE:
            if f"serving.{name}" in own and own[f"serving.{name}"] == own.get(f"training.{name}"):
                changed.discard(f"serving.{name}")
        return any(key.startswith("serving.") for key in changed.difference(NEUTRAL_SERVING))

    def enters_means(self, levels: Levels) -> bool:
        """Whether the settings of a cell enter the mean effect of a level that changes weights."""
        named = zip(self.factors, levels, strict=True)
        is_declared = all(level in self.over.get(factor, (level,)) for factor, level in named)
        return is_declared and not self.is_served_otherwise(levels)

    def select(self, matched: Sequence[Corners]) -> list[Corners]:
        """Return the settings that a mean difference is over.

        They are those whose cell with the baseline's levels enters means. If there is none, as for
        training with a coarse cache that is only ever served so, they are all settings.
        """
        return [corners for corners in matched if self.enters_means(corners[-1][1])] or list(
            matched
        )

    def changes_serving_alone(self, change: Change) -> bool:
        """Whether levels differ from the baseline's in serving alone."""
        for factor, level in change:
            patches = self.patches.get(factor, {})
            base = patches.get(self.factors[factor][0], {})
            changed = _find_changed(patches.get(level, {}), base)
            if not changed or not all(key.startswith("serving.") for key in changed):
                return False
        return True

    @cached_property
    def free_levels(self) -> frozenset[tuple[str, str]]:
        """Levels that save nothing: equal bytes in every setting, or a factor that is kept."""
        free = set()
        for index, (factor, (base, *levels)) in enumerate(self.factors.items()):
            for level in levels:
                pairs = [
                    (self.kv_bytes.get(cell), self.kv_bytes.get(_replace(cell, index, base)))
                    for cell in self.cells
                    if cell[index] == level and _replace(cell, index, base) in self._cell_set
                ]
                has_equal_bytes = all(own is not None and own == other for own, other in pairs)
                if factor in self.kept or (pairs and has_equal_bytes):
                    free.add((factor, level))
        return frozenset(free)

    @cached_property
    def _cell_set(self) -> frozenset[Levels]:
        return frozenset(self.cells)

    def reference(self, levels: Levels) -> Levels:
        """Return the cell that a cell is compared with; the cell itself if it saves nothing.

        Where the design lacks the cell with all levels that save nothing, it is the one with most
        of them.
        """
        named = enumerate(zip(self.factors, levels, strict=True))
        kept = [index for index, one in named if one in self.free_levels]
        for count in range(len(kept), 0, -1):
            for chosen in combinations(kept, count):
                cell = tuple(
                    level if index in chosen else self.baseline[index]
                    for index, level in enumerate(levels)
                )
                if cell in self._cell_set:
                    return cell
        return self.baseline

    @cached_property
    def references(self) -> tuple[Levels, ...]:
        """The cells that others are compared with, the baseline first."""
        found = {self.reference(levels) for levels in self.cells} - {self.baseline}
        return (self.baseline, *(levels for levels in self.cells if levels in found))


def _find_changed(own: Mapping[str, Any], base: Mapping[str, Any]) -> set[str]:
    return {key for key in own.keys() | base.keys() if own.get(key) != base.get(key)}


def _replace(levels: Levels, index: int, level: str) -> Levels:
    return (*levels[:index], level, *levels[index + 1 :])
