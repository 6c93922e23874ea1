"""Two sweeps, or two records of one sweep, side by side: joined by cell, conclusions compared."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.report.effects import Effect
from kvlab.report.pareto_front import best_cells_by_budget, memory_front
from kvlab.report.statistics import UNTESTED, Estimate, estimate
from kvlab.report.study import BASELINE_LABEL, Study, select_significant
from kvlab.report.trial_rows import Levels
from kvlab.store.metrics import METRICS

NOT_ASKED = "not asked"
NO_CONCLUSION = frozenset(
    {NOT_ASKED, "no matched pair", UNTESTED["one seed"], UNTESTED["unvaried"]}
)
"""Verdicts that say nothing about a level."""


@dataclass(frozen=True)
class CellChange:
    """A cell that both have: its means and their difference, over the seeds that both have.

    ``verdict``: whether it differs, Holm-corrected for all cells.
    """

    levels: dict[str, str]
    before: float
    after: float
    difference: float
    low: float
    high: float
    seeds: int
    verdict: str


@dataclass(frozen=True)
class Conclusion:
    """What each says about one level, two levels together, a cell on the front or a budget.

    ``by_means``: it ranks means, of which neighbours change places by noise alone.
    """

    about: str
    before: str
    after: str
    difference_before: float | None = None
    difference_after: float | None = None
    by_means: bool = False

    @property
    def changed(self) -> bool:
        """Whether both conclude something, and not the same."""
        return self.concluded and self.before != self.after

    @property
    def concluded(self) -> bool:
        return not self.by_means and NO_CONCLUSION.isdisjoint((self.before, self.after))

    @property
    def moved(self) -> bool:
        """Whether both rank means, and not alike."""
        said = {self.before, self.after}
        return self.by_means and len(said) > 1 and NOT_ASKED not in said


@dataclass(frozen=True)
class Comparison:
    """B against A. ``warnings`` say what else differs, and may be the reason."""

    metric: str
    cells: tuple[CellChange, ...]
    only_before: int
    only_after: int
    conclusions: tuple[Conclusion, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        conclusions = [
            {**asdict(one), "changed": one.changed, "moved": one.moved} for one in self.conclusions
        ]
        return {**asdict(self), "conclusions": conclusions}


def compare_sweeps(before: Study, after: Study) -> Comparison:
    """Joins the cells of two studies by the levels of the factors that either has.

    A factor that only one of them has counts as being at its baseline level in the other.
    """
    metric = before.primary_metric
    one, other = _cells_by_key(before), _cells_by_key(after)
    shared = [key for key in one if key in other]
    return Comparison(
        metric,
        tuple(_compare_cells(before, after, {one[key]: other[key] for key in shared}, metric)),
        len(one) - len(shared),
        len(other) - len(shared),
        (
            *_compare_effects(before.effects(metric), after.effects(metric)),
            *_compare_effects(before.interactions(metric), after.interactions(metric)),
            *_compare_fronts(before, after),
            *_compare_budgets(before, after),
        ),
        tuple(_warnings(before, after)),
    )


Key = frozenset[tuple[str, str]]


def _cells_by_key(study: Study) -> dict[Key, Levels]:
    """Cells by the levels that differ from the baseline, whatever the factors' order."""
    return {_cell_key(study, cell): cell for cell in study.cells}


def _cell_key(study: Study, levels: Levels) -> Key:
    named = zip(study.factors, levels, study.baseline, strict=True)
    return frozenset((factor, level) for factor, level, base in named if level != base)


def _compare_cells(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> Iterator[CellChange]:
    changes: dict[Levels, Estimate] = {}
    common: dict[Levels, list[int]] = {}
    for one, other in shared.items():
        mine, theirs = before.values(one, metric), after.values(other, metric)
        common[one] = sorted(mine.keys() & theirs.keys())
        if common[one]:
            differences = [theirs[seed] - mine[seed] for seed in common[one]]
            scale = max(map(abs, mine.values()))
            changes[one] = estimate(differences, scale, in_steps=METRICS[metric].is_share)
    called = select_significant(changes)
    for one, change in changes.items():
        mine, seeds = before.values(one, metric), common[one]
        mean = sum(mine[seed] for seed in seeds) / len(seeds)
        yield CellChange(
            dict(zip(before.factors, one, strict=True)),
            mean,
            mean + change.value,
            change.value,
            change.low,
            change.high,
            len(seeds),
            "differs" if one in called else UNTESTED.get(change.kind, "within noise"),
        )


def _compare_effects(before: Iterable[Effect], after: Iterable[Effect]) -> Iterator[Conclusion]:
    one = {effect.name: effect for effect in before}
    other = {effect.name: effect for effect in after}
    for name in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(name), other.get(name)
        yield Conclusion(name, _verdict(mine), _verdict(theirs), _value(mine), _value(theirs))


def _compare_fronts(before: Study, after: Study) -> Iterator[Conclusion]:
    """Cells that are on the front of stored bytes against quality in either."""
    found = [
        {_cell_name(study, point.levels): point.is_on_front for point in memory_front(study)}
        for study in (before, after)
    ]
    words = {True: "on the front", False: "beaten", None: NOT_ASKED}
    for name in dict.fromkeys([*found[0], *found[1]]):
        if found[0].get(name) or found[1].get(name):
            one, other = (words[each.get(name)] for each in found)
            yield Conclusion(f"front: {name}", one, other, by_means=True)


def _compare_budgets(before: Study, after: Study) -> Iterator[Conclusion]:
    """The best cell in every budget that either has."""
    found = [
        {
            best.condition: _cell_name(study, best.best.levels)
            for best in best_cells_by_budget(study)
        }
        for study in (before, after)
    ]
    for condition in dict.fromkeys([*found[0], *found[1]]):
        one, other = (each.get(condition, NOT_ASKED) for each in found)
        yield Conclusion(f"best {condition}", one, other, by_means=True)


def _cell_name(study: Study, levels: Levels) -> str:
    """A cell by the same levels, in an order that both studies share."""
    return (
        "+".join(sorted(f"{f}={level}" for f, level in _cell_key(study, levels))) or BASELINE_LABEL
    )


def _verdict(effect: Effect | None) -> str:
    return NOT_ASKED if effect is None else effect.verdict


def _value(effect: Effect | None) -> float | None:
    return effect.estimate.value if effect and effect.estimate else None


def _warnings(before: Study, after: Study) -> Iterator[str]:
    for what, path in (
        ("code (commit)", ("commit",)),
        ("uncommitted changes", ("dirty",)),
        ("kvlab version", ("kvlab",)),
        ("package versions", ("versions",)),
        ("Python", ("python",)),
        ("device", ("device",)),
        ("data", ("data", "digest")),
    ):
        one, other = _provenance_values(before, path), _provenance_values(after, path)
        if one != other:
            yield f"{what} differ: {_join_sorted(one)} against {_join_sorted(other)}"
    yield from _patch_warnings(before, after)
    if before.seeds != after.seeds:
        mine, theirs = (", ".join(map(str, study.seeds)) for study in (before, after))
        yield f"seeds differ: {mine} against {theirs}"
    bases = before.sweep.get("experiment_yaml"), after.sweep.get("experiment_yaml")
    if bases[0] != bases[1]:
        yield "base experiments differ"
    if before.primary_metric != after.primary_metric:
        yield f"quality is measured by {before.primary_metric} against {after.primary_metric}"


def _patch_warnings(before: Study, after: Study) -> Iterator[str]:
    """Levels of one name that set unlike things, and so are not the same level."""
    one, other = before.sweep.get("patches", {}), after.sweep.get("patches", {})
    for factor in sorted(one.keys() & other.keys()):
        for level in sorted(one[factor].keys() & other[factor].keys()):
            mine, theirs = one[factor][level], other[factor][level]
            if mine != theirs:
                yield f"{factor}={level} sets {_format_patch(mine)} against {_format_patch(theirs)}"


def _format_patch(patch: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in patch.items()) or "nothing"


def _provenance_values(study: Study, path: tuple[str, ...]) -> set[str]:
    found = set()
    for row in study.done_rows:
        value: Any = row.record["provenance"]
        for key in path:
            value = (value or {}).get(key)
        found.add(_format_fact(value))
    return found


def _format_fact(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {version}" for name, version in sorted(value.items()))
    return str(value)


def _join_sorted(values: set[str]) -> str:
    return ", ".join(sorted(values)) or "nothing"
