"""Compare two sweeps, or two records of one sweep: their cells and their conclusions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.analysis.effects import Effect
from kvlab.analysis.statistics import UNTESTED, Estimate, estimate
from kvlab.analysis.study import BASELINE_LABEL, Study, select_significant
from kvlab.analysis.trial_rows import Levels
from kvlab.report.pareto_front import best_cells_by_budget, memory_front
from kvlab.store.metrics import METRICS

NOT_ASKED = "not asked"
NO_CONCLUSION = frozenset(
    {NOT_ASKED, "no matched pair", UNTESTED["one seed"], UNTESTED["unvaried"]}
)
"""Verdicts that conclude nothing about a level."""


@dataclass(frozen=True)
class CellChange:
    """A cell that both sweeps have, over the seeds that both have.

    Attributes:
        levels: Factor -> level.
        before: Mean in the first sweep.
        after: Mean in the second sweep.
        difference: ``after`` minus ``before``.
        low: Lower end of the 95% interval of the difference.
        high: Upper end of the interval.
        seeds: Number of seeds.
        verdict: Whether the cell differs, Holm-corrected for all cells.
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
    """What each sweep concludes about a level, two levels, a cell on the front, or a budget.

    Attributes:
        about: The subject.
        before: The first sweep's conclusion.
        after: The second sweep's conclusion.
        difference_before: The difference behind it, if there is one.
        difference_after: The same of the second sweep.
        by_means: Whether it ranks means, whose neighbours change places by noise alone.
    """

    about: str
    before: str
    after: str
    difference_before: float | None = None
    difference_after: float | None = None
    by_means: bool = False

    @property
    def changed(self) -> bool:
        """Whether both conclude something, and they disagree."""
        return self.concluded and self.before != self.after

    @property
    def concluded(self) -> bool:
        return not self.by_means and NO_CONCLUSION.isdisjoint((self.before, self.after))

    @property
    def moved(self) -> bool:
        """Whether both rank means, and the rankings differ."""
        rankings = {self.before, self.after}
        return self.by_means and len(rankings) > 1 and NOT_ASKED not in rankings


@dataclass(frozen=True)
class Comparison:
    """The second sweep against the first. ``warnings`` name other differences, possible causes."""

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
    """Compare two studies, whose cells are joined by their levels.

    A factor that only one of them has is at its baseline level in the other.
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
    """Return the cells by the levels that differ from the baseline, independent of their order."""
    return {_cell_key(study, cell): cell for cell in study.cells}


def _cell_key(study: Study, levels: Levels) -> Key:
    named = zip(study.factors, levels, study.baseline, strict=True)
    return frozenset((factor, level) for factor, level, base in named if level != base)


def _compare_cells(
    before: Study, after: Study, shared: Mapping[Levels, Levels], metric: str
) -> Iterator[CellChange]:
    changes: dict[Levels, Estimate] = {}
    shared_seeds: dict[Levels, list[int]] = {}
    for one, other in shared.items():
        first, second = before.values(one, metric), after.values(other, metric)
        shared_seeds[one] = sorted(first.keys() & second.keys())
        if shared_seeds[one]:
            differences = [second[seed] - first[seed] for seed in shared_seeds[one]]
            scale = max(map(abs, first.values()))
            changes[one] = estimate(differences, scale, in_steps=METRICS[metric].is_share)
    significant = select_significant(changes)
    for one, change in changes.items():
        first, seeds = before.values(one, metric), shared_seeds[one]
        mean = sum(first[seed] for seed in seeds) / len(seeds)
        yield CellChange(
            dict(zip(before.factors, one, strict=True)),
            mean,
            mean + change.value,
            change.value,
            change.low,
            change.high,
            len(seeds),
            "differs" if one in significant else UNTESTED.get(change.kind, "within noise"),
        )


def _compare_effects(before: Iterable[Effect], after: Iterable[Effect]) -> Iterator[Conclusion]:
    one = {effect.name: effect for effect in before}
    other = {effect.name: effect for effect in after}
    for name in dict.fromkeys([*one, *other]):
        first, second = one.get(name), other.get(name)
        yield Conclusion(name, _verdict(first), _verdict(second), _value(first), _value(second))


def _compare_fronts(before: Study, after: Study) -> Iterator[Conclusion]:
    """Compare the cells that are on the front of stored bytes against quality in either."""
    by_study = [
        {_cell_name(study, point.levels): point.is_on_front for point in memory_front(study)}
        for study in (before, after)
    ]
    verdicts = {True: "on the front", False: "beaten", None: NOT_ASKED}
    for name in dict.fromkeys([*by_study[0], *by_study[1]]):
        if by_study[0].get(name) or by_study[1].get(name):
            one, other = (verdicts[each.get(name)] for each in by_study)
            yield Conclusion(f"front: {name}", one, other, by_means=True)


def _compare_budgets(before: Study, after: Study) -> Iterator[Conclusion]:
    """Compare the best cell of every budget that either has."""
    by_study = [
        {
            best.condition: _cell_name(study, best.point.levels)
            for best in best_cells_by_budget(study)
        }
        for study in (before, after)
    ]
    for condition in dict.fromkeys([*by_study[0], *by_study[1]]):
        one, other = (each.get(condition, NOT_ASKED) for each in by_study)
        yield Conclusion(f"best {condition}", one, other, by_means=True)


def _cell_name(study: Study, levels: Levels) -> str:
    """Return a name of a cell that does not depend on the order of the factors."""
    return (
        "+".join(sorted(f"{f}={level}" for f, level in _cell_key(study, levels))) or BASELINE_LABEL
    )


def _verdict(effect: Effect | None) -> str:
    return NOT_ASKED if effect is None else effect.verdict


def _value(effect: Effect | None) -> float | None:
    return effect.estimate.value if effect and effect.estimate else None


def _warnings(before: Study, after: Study) -> Iterator[str]:
    for name, path in (
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
            yield f"{name} differ: {_join_sorted(one)} against {_join_sorted(other)}"
    yield from _patch_warnings(before, after)
    if before.seeds != after.seeds:
        first, second = (", ".join(map(str, study.seeds)) for study in (before, after))
        yield f"seeds differ: {first} against {second}"
    base_experiments = before.sweep.get("experiment_yaml"), after.sweep.get("experiment_yaml")
    if base_experiments[0] != base_experiments[1]:
        yield "base experiments differ"
    if before.primary_metric != after.primary_metric:
        yield f"quality is measured by {before.primary_metric} against {after.primary_metric}"


def _patch_warnings(before: Study, after: Study) -> Iterator[str]:
    """Warn of levels of one name that set different values."""
    one, other = before.sweep.get("patches", {}), after.sweep.get("patches", {})
    for factor in sorted(one.keys() & other.keys()):
        for level in sorted(one[factor].keys() & other[factor].keys()):
            first, second = one[factor][level], other[factor][level]
            if first != second:
                patches = f"{_format_patch(first)} against {_format_patch(second)}"
                yield f"{factor}={level} sets {patches}"


def _format_patch(patch: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in patch.items()) or "nothing"


def _provenance_values(study: Study, path: tuple[str, ...]) -> set[str]:
    values = set()
    for row in study.done_rows:
        value: Any = row.record["provenance"]
        for key in path:
            value = (value or {}).get(key)
        values.add(_format_fact(value))
    return values


def _format_fact(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {version}" for name, version in sorted(value.items()))
    return str(value)


def _join_sorted(values: set[str]) -> str:
    return ", ".join(sorted(values)) or "nothing"
