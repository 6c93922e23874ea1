"""What reports print of effects and cells, computed again from results.csv and sweep.json.

It follows what kvlab/analysis/README.md and the docstrings there say, with pandas, numpy and scipy
alone: nothing of kvlab is imported, so an error there is not repeated here. It takes records in
which every trial is done, of designs with matched pairs.
"""

import json
import math
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from tests.report.reference_errors import (
    BySeed,
    Cell,
    Change,
    Difference,
    find_items_metric,
    holm,
    item_variance,
    judge,
    look_bound,
    pool_errors,
    spent_share,
)

Pairs = Mapping[Cell, Sequence[tuple[int, Cell]]]
"""The signed cells of every setting, by its cell with the baseline's levels."""


class Sweep:
    """The results and the description of one sweep."""

    def __init__(self, results: pd.DataFrame, description: Mapping[str, Any]):
        self.results, self.description, self.decide = results, description, description["decide"]
        self.factors: dict[str, list[str]] = dict(description["factors"])
        self.baseline = tuple(levels[0] for levels in self.factors.values())
        self.alpha, self.over = float(self.decide["alpha"]), self.decide.get("over") or {}
        declared = description.get("stages", {}).get("declared", {})
        self.looks = declared["looks"]["seeds"]["looks"] if "looks" in declared else None
        served = "loss_served" if "measured.loss_served" in results else "loss"
        self.metric = self.decide["metric"] or served
        columns = [results[f"factor.{name}"].astype(str) for name in self.factors]
        self.row_cells: list[Cell] = list(zip(*columns, strict=True))
        self.cells = list(dict.fromkeys(self.row_cells))
        self.size = dict(zip(self.row_cells, results["kv.bytes_at_block_size"], strict=True))
        self.trainings: dict[Cell, set[str]] = {cell: set() for cell in self.cells}
        for cell, training in zip(self.row_cells, results["training"], strict=True):
            self.trainings[cell].add(training)
        # for every cell the first one with the same trained weights
        self.training_names = {
            cell: next(one for one in self.cells if self.trainings[one] & own)
            for cell, own in self.trainings.items()
        }

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """Read a report's folder: results.csv, and sweep.json of the record beside it."""
        with tarfile.open(folder / "record.tar.xz") as archive:
            found = next(entry for entry in archive if entry.name.endswith("/sweep.json"))
            stream = archive.extractfile(found)
            assert stream is not None, found.name
            return cls(pd.read_csv(folder / "results.csv"), json.load(stream))

    def values(self, metric: str, seeds: Iterable[int] | None = None) -> dict[Cell, BySeed]:
        """Return the measured values of every cell by seed."""
        found: dict[Cell, BySeed] = {cell: {} for cell in self.cells}
        column = self.results[f"measured.{metric}"]
        for cell, seed, value in zip(self.row_cells, self.results["seed"], column, strict=True):
            if not math.isnan(value) and (seeds is None or seed in seeds):
                found[cell][int(seed)] = float(value)
        return found

    # What is compared with what

    def is_served_otherwise(self, cell: Cell) -> bool:
        """Whether a cell is served neither as the baseline nor as it was trained."""
        own, base = (
            {
                key: value
                for factor, level in zip(self.factors, levels, strict=True)
                for key, value in self.description["patches"][factor][level].items()
                if factor not in self.over
            }
            for levels in (cell, self.baseline)
        )
        for key in own.keys() | base.keys():
            name = key.removeprefix("serving.")
            if name in (key, "compile") or own.get(key) == base.get(key):
                continue
            is_stored_so = name in ("kv_dtype", "kv_group", "kv_residual") and key in own
            if not (is_stored_so and own[key] == own.get(f"training.{name}")):
                return True
        return False

    def enters_means(self, cell: Cell) -> bool:
        named = zip(self.factors, cell, strict=True)
        declared = all(level in self.over.get(factor, [level]) for factor, level in named)
        return declared and not self.is_served_otherwise(cell)

    def changes_serving(self, factor: str, level: str) -> bool:
        """Whether a level differs from its factor's baseline level in serving alone."""
        patches = self.description["patches"][factor]
        own, base = patches[level], patches[self.factors[factor][0]]
        changed = [key for key in own.keys() | base.keys() if own.get(key) != base.get(key)]
        return bool(changed) and all(key.startswith("serving.") for key in changed)

    def pairs(
        self, change: Change, bases: Mapping[str, str] | None = None
    ) -> dict[Cell, list[tuple[int, Cell]]]:
        """Return the signed cells of every setting that a difference is the mean over.

        Args:
            bases: Levels that are not the baseline's and that a factor's level is compared with.
        """
        names, found = list(self.factors), {}
        for cell in self.cells:
            if any(cell[names.index(factor)] != level for factor, level in change):
                continue
            corners = []
            for to_base in product((False, True), repeat=len(change)):
                corner = list(cell)
                for (factor, _), is_base in zip(change, to_base, strict=True):
                    if is_base:
                        base = (bases or {}).get(factor, self.factors[factor][0])
                        corner[names.index(factor)] = base
                corners.append(((-1) ** sum(to_base), tuple(corner)))
            if all(corner in self.cells for _, corner in corners):
                found[corners[-1][1]] = corners
        trained = {base: corners for base, corners in found.items() if self.enters_means(base)}
        return trained or found

    def reference(self, cell: Cell) -> Cell:
        """Return the cell with the same levels of the factors that save no byte."""
        free = [i for i in range(len(cell)) if self._saves_nothing(i, cell[i])]
        for count in range(len(free), 0, -1):
            for kept in combinations(free, count):
                both = enumerate(zip(cell, self.baseline, strict=True))
                other = tuple(own if index in kept else base for index, (own, base) in both)
                if other in self.cells:
                    return other
        return self.baseline

    def _saves_nothing(self, index: int, level: str) -> bool:
        base, factor = self.baseline[index], list(self.factors)[index]
        if level == base:
            return False
        kept = list(self.decide.get("reference") or [])
        kept += [(self.description.get("size") or {}).get("factor")]
        own = [cell for cell in self.cells if cell[index] == level]
        pairs = [(cell, (*cell[:index], base, *cell[index + 1 :])) for cell in own]
        sizes = [(self.size[a], self.size[b]) for a, b in pairs if b in self.cells]
        return factor in kept or (bool(sizes) and all(one == other for one, other in sizes))

    # Differences

    def difference(
        self, values: Mapping[Cell, BySeed], change: Change, pairs: Pairs, metric: str
    ) -> Difference | None:
        """Return the mean over groups of settings, at the seeds that all of them have."""
        by_setting: dict[Cell, BySeed] = {}
        for setting, corners in pairs.items():
            seeds = set.intersection(*(set(values[cell]) for _, cell in corners))
            sums = {s: sum(sign * values[cell][s] for sign, cell in corners) for s in sorted(seeds)}
            if sums:
                by_setting[setting] = sums
        if not by_setting:
            return None
        groups = self._group({setting: pairs[setting] for setting in by_setting})
        for group in groups:  # a setting without the seeds of its group is left out
            most = max(len(by_setting[one]) for one in group)
            group[:] = [one for one in group if len(by_setting[one]) == most]
        options = []
        for group in groups:
            seeds = set(by_setting[group[0]])
            having = [one for one in groups if seeds <= set(by_setting[one[0]])]
            options.append((len(seeds) > 1, len(having) * len(seeds), len(seeds), having, seeds))
        *_, chosen, seeds = max(options, key=lambda option: option[:3])
        shares = {one: 1 / len(chosen) / len(group) for group in chosen for one in group}
        by_seed = {
            s: sum(w * by_setting[one][s] for one, w in shares.items()) for s in sorted(seeds)
        }
        weights = dict.fromkeys(values, 0.0)
        for setting, share in shares.items():
            for sign, cell in pairs[setting]:
                weights[cell] += share * sign
        means = {one: fmean(by_setting[one][s] for s in by_seed) for one in shares}
        sizes = [abs(values[c][s]) for one in shares for _, c in pairs[one] for s in by_seed]
        weights = {cell: weight for cell, weight in weights.items() if weight}
        found = Difference(change, by_seed, weights, means, max(sizes), metric)
        return self._with_item_error(found)

    def _with_item_error(self, one: Difference) -> Difference:
        """Give a difference of shares of items the error of its items, and its largest value.

        Equal shares of cells that share their weights are no chance, and have no such error.
        """
        counted = find_items_metric(one.metric)
        if counted is None:
            return one
        items, shares, variance = self.values(counted), self.values(one.metric), 0.0
        for cell, weight in one.weights.items():
            own = [item_variance(shares[cell][s], items[cell][s]) for s in one.by_seed]
            variance += weight**2 * fmean(own) / len(own)
        is_chance = any(self._sum_by_training(one).values()) or any(one.by_seed.values())
        reach = sum(weight for weight in one.weights.values() if weight > 0)
        return replace(one, item_error=math.sqrt(variance) if is_chance else 0.0, reach=reach)

    def _sum_by_training(self, one: Difference) -> dict[Cell, float]:
        """Return the weight of every training in a difference; without those that cancel."""
        by_training: dict[Cell, float] = {}
        for cell, weight in one.weights.items():
            name = self.training_names[cell]
            by_training[name] = by_training.get(name, 0.0) + weight
        return {name: weight for name, weight in by_training.items() if abs(weight) > 1e-9}

    def _group(self, pairs: Pairs) -> list[list[Cell]]:
        """Join settings that share trained weights."""
        groups: list[tuple[set[str], list[Cell]]] = []
        for setting, signed in pairs.items():
            own, joined = set().union(*(self.trainings[cell] for _, cell in signed)), [setting]
            for group in [one for one in groups if one[0] & own]:
                groups.remove(group)
                own, joined = own | group[0], group[1] + joined
            groups.append((own, joined))
        return [settings for _, settings in groups]

    def with_errors(
        self, differences: Sequence[Difference], values: Mapping[Cell, BySeed]
    ) -> list[Difference]:
        """Give differences the larger of their own and the pooled standard error.

        Differences of shares of items keep their own.
        """
        weights: dict[int, dict[Cell, float]] = {}
        used: set[Cell] = set()
        for number, one in enumerate(differences):
            by_training = self._sum_by_training(one)
            if one.is_tested and by_training and find_items_metric(one.metric) is None:
                weights[number] = by_training
                used |= set(one.weights)
        if not weights:
            return [one.with_own_error() for one in differences]
        rows = [(self.training_names[c], s, v) for c in used for s, v in values[c].items()]
        trained: dict[Cell, BySeed] = {}
        for (name, seed), own in pd.DataFrame(rows).groupby([0, 1])[2]:
            trained.setdefault(name, {})[seed] = fmean(own)
        pairs = [(differences[n], own) for n, own in weights.items()]
        larger = pool_errors(pairs, trained, self.looks is None)
        return [
            larger(one, weights[number]) if number in weights else one.with_own_error()
            for number, one in enumerate(differences)
        ]

    def main_effects(self, metric: str, seeds: Iterable[int] | None = None) -> list[Difference]:
        """Return every level's mean difference over settings, with its error, not yet judged."""
        values, found = self.values(metric, seeds), []
        for factor, levels in self.factors.items():
            for level in levels[1:]:
                change = ((factor, level),)
                one = self.difference(values, change, self.pairs(change), metric)
                assert one is not None, f"{factor}={level} has no pair: a contrast is needed"
                found.append(one)
        return self.with_errors(found, values)

    def interactions(self, metric: str) -> list[Difference]:
        """Return what every two levels do beyond their sum, judged at a fifth of the error."""
        values, found = self.values(metric), []
        for first, second in combinations(self.factors, 2):
            for one, other in product(self.factors[first][1:], self.factors[second][1:]):
                change = ((first, one), (second, other))
                pairs = self.pairs(change, self.other_base(change))
                difference = self.difference(values, change, pairs, metric)
                found += [difference] if difference is not None else []
        margin = self.decide["margin"] if metric == self.metric else None
        return judge(self.with_errors(found, values), 0.2 * self.alpha, margin)

    def other_base(self, change: Change) -> dict[str, str]:
        """Return the level that stands for a factor's baseline level that the other level lacks.

        It is the first beside which the design has that level and the baseline level of its factor.
        """
        for one, (factor, level) in (change, change[::-1]):
            mine, theirs = (list(self.factors).index(name) for name in (one[0], factor))
            beside = {cell[theirs] for cell in self.cells if cell[mine] == one[1]}
            both = {c[theirs] for c in self.cells if c[mine] == self.baseline[mine]} & beside
            levels = self.factors[factor]
            if levels[0] not in beside and both and (base := min(both, key=levels.index)) != level:
                return {factor: base}
        return {}

    # Effects as they are printed

    def effects(self, metric: str) -> list[Difference]:
        """Return the rows of the table of effects."""
        is_decided = metric == self.metric
        margin = self.decide["margin"] if is_decided else None
        claims = self.decide["claims"] if is_decided else None
        interactions, values = self.interactions(metric), self.values(metric)
        effects = [
            replace(one, is_claimed=claims is None or one.claim in claims)
            for one in self.main_effects(metric)
        ]
        if is_decided and self.looks is not None:
            return [part for one in effects for part in self._judge_by_looks(one, interactions)]
        parts = [self._parts(one, interactions, values) for one in effects]
        if any(len(own) > 1 for own in parts):
            effects = self.with_errors([part for own in parts for part in own], values)
        return judge(effects, self.alpha, margin)

    def _parts(
        self, effect: Difference, interactions: Sequence[Difference], values: Mapping[Cell, BySeed]
    ) -> list[Difference]:
        """Return a level beside every kind of setting apart, where they disagree."""
        ((factor, level),) = effect.change
        names = list(self.factors)
        if not effect.is_claimed:
            return [effect]
        if self.changes_serving(factor, level):
            varied = {n for i, n in enumerate(names) if len({s[i] for s in effect.settings}) > 1}
            apart = varied - {factor}
        else:
            apart = {
                other
                for one in interactions
                if (factor, level) in one.change and (one.low >= 0 or one.high <= 0)
                for other, other_level in one.change
                if other != factor and not self.changes_serving(other, other_level)
            }
        kinds: dict[Change, dict[Cell, list[tuple[int, Cell]]]] = {}
        for setting, corners in self.pairs(effect.change).items():
            at = tuple((name, setting[i]) for i, name in enumerate(names) if name in apart)
            kinds.setdefault(at, {})[setting] = corners
        change, metric = effect.change, effect.metric
        found = [(at, self.difference(values, change, own, metric)) for at, own in kinds.items()]
        parts = [replace(one, at=at) for at, one in found if one is not None]
        return parts if apart and len(parts) > 1 else [effect]

    def _judge_by_looks(
        self, effect: Difference, interactions: Sequence[Difference]
    ) -> list[Difference]:
        """Return the parts of an effect at the seeds of the look that has judged it."""
        assert self.looks is not None, "only sweeps with looks"
        taken = self.description["looks"]["taken"]
        states = taken[-1]["states"]
        if effect.claim not in states:
            return [effect.with_own_error()]
        state = states[effect.claim]
        look = next(one for one in taken if one["states"][effect.claim]["sizes"] == state["sizes"])
        first = self.description["stages"]["declared"]["looks"]["seeds"]["first"]
        seeds = range(first, first + look["seeds"])
        then = next(e for e in self.main_effects(self.metric, seeds) if e.change == effect.change)
        values = self.values(self.metric, seeds)
        parts = self._parts(then, interactions, values)
        sizes, level = tuple(state["sizes"]), self.alpha / len(states)
        if len(parts) == 1 and math.isclose(then.value, state["value"], abs_tol=1e-9):
            own = then.with_own_error()
            reach = look_bound(sizes, self.looks[-1], level) * own.error
            low, high = own.value - reach, own.value + reach
            if abs(own.value) >= look_bound(sizes, self.looks[-1], state["level"]) * own.error:
                low, high = (max(low, 0.0), high) if own.value > 0 else (low, min(high, 0.0))
            return [replace(own, low=low, high=high)]
        if len(parts) > 1:
            parts = self.with_errors(parts, values)
        share = spent_share(self.looks, sizes[-1], self.alpha) / len(states)
        judged = judge(parts, self.alpha * share, self.decide["margin"])
        return [replace(one, p=min(1.0, one.p / share)) for one in judged]

    # Cells

    def cell_differences(self, effects: Sequence[Difference]) -> dict[Cell, Difference]:
        """Return every cell minus its reference, judged together; an effect where it is one."""
        values = self.values(self.metric)
        references = {cell: self.reference(cell) for cell in self.cells}
        found = {
            cell: self.cell_difference(values, cell, reference)
            for cell, reference in references.items()
            if reference != cell
        }
        tested = self._with_cell_errors(found, values)
        shares = [1.0] * len(tested)
        if self.looks is not None:
            counts = [len(one.by_seed) for one in tested.values()]
            shares = [spent_share(self.looks, count, self.alpha) for count in counts]
        weights = [share / len(tested) for share in shares]
        judged = holm(list(tested.values()), weights, self.alpha, self.decide["margin"])
        found.update(zip(tested, judged, strict=True))
        claimed = [effect for effect in effects if effect.is_claimed]
        return {
            cell: next((effect for effect in claimed if effect.weights == one.weights), one)
            for cell, one in found.items()
        }

    def cell_difference(self, values: Mapping[Cell, BySeed], cell: Cell, other: Cell) -> Difference:
        found = self.difference(values, (), {other: [(1, cell), (-1, other)]}, self.metric)
        assert found is not None, f"{cell} and {other} share no seed"
        return found

    def _with_cell_errors(
        self, differences: Mapping[Cell, Difference], values: Mapping[Cell, BySeed]
    ) -> dict[Cell, Difference]:
        """Return the cells that can be tested, with their errors.

        The pooled one is over the differences from the baseline of all cells with weights of their
        own that are served as they were trained.
        """
        base, names = self.baseline, self.training_names
        served = {cell for cell in self.cells if self.is_served_otherwise(cell)}
        apart = [c for c in self.cells if names[c] == c != names[base] and c not in served]
        from_base = [self.cell_difference(values, cell, base) for cell in apart]
        pairs = [(one, one.weights) for one in from_base if len(one.by_seed) > 1]
        pairs = [] if find_items_metric(self.metric) else pairs
        own = {cell: values[cell] for cell in self.cells if cell not in served}
        larger = pool_errors(pairs, own, self.looks is None) if pairs else None
        tested = {}
        for cell, one in differences.items():
            if one.is_tested:
                reference = self.reference(cell)
                keeps_own = names[cell] == names[reference] or served & {cell, reference}
                is_own = keeps_own or larger is None
                tested[cell] = one.with_own_error() if is_own else larger(one, one.weights)
        return tested

    def gaps(self) -> dict[Cell, Difference]:
        """Return the serving gap of every cell, judged together; of rounding there is no test."""
        by_cell = {cell: gaps for cell, gaps in self.values("serving_gap").items() if gaps}
        gaps = {c: Difference((), g, {}, {}, 1.0).with_own_error() for c, g in by_cell.items()}
        real = [cell for cell, one in gaps.items() if max(map(abs, one.by_seed.values())) >= 1e-4]
        tested = {cell: gaps[cell] for cell in real if gaps[cell].is_tested}
        shares = [1.0] * len(tested)
        if self.looks is not None:
            counts = [len(one.by_seed) for one in tested.values()]
            shares = [spent_share(self.looks, count, self.alpha) for count in counts]
        weights = [share / len(tested) for share in shares]
        judged = holm(list(tested.values()), weights, self.alpha, None)
        return gaps | dict(zip(tested, judged, strict=True))
