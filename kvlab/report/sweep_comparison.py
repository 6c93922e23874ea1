"""Compare two sweeps, or two records of one sweep: their cells and their conclusions."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.analysis.study import BASELINE_LABEL, Study
from kvlab.analysis.sweep_shifts import Shift, SweepShifts, estimate_shifts
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import VERDICTS
from kvlab.report.pareto_front import CellPoint, best_cells_by_budget, memory_front

NOT_ASKED = "not asked"


@dataclass(frozen=True)
class CellChange:
    """A cell that both sweeps have.

    Attributes:
        levels: Factor -> level.
        before: Mean in the first sweep; of paired trials, over the seeds that both have.
        after: Mean in the second sweep, over the same seeds.
        difference: ``after`` minus ``before``.
        low: Lower end of the 95% interval of the difference, simultaneous for all that is compared.
        high: Upper end of the interval.
        seeds: Number of seeds.
        verdict: Whether the cell differs.
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
        shift: The second difference minus the first; of a ranking, that of the cell which moved
            most surely. None if it cannot be estimated.
        low: Lower end of the simultaneous interval of the shift.
        high: Upper end of the interval.
        verdict: ``changed``, ``within noise``, ``identical`` or why nothing is tested.
        is_ranking: Whether it ranks cells, whose neighbours change places by noise alone.
    """

    about: str
    before: str
    after: str
    difference_before: float | None
    difference_after: float | None
    shift: float | None
    low: float
    high: float
    verdict: str
    is_ranking: bool = False

    @property
    def changed(self) -> bool:
        """Whether the truths behind the two conclusions differ."""
        return self.verdict == "changed" and not (self.is_ranking and self.before == self.after)

    @property
    def compared(self) -> bool:
        """Whether the difference of the two was tested, or needs no test."""
        return self.verdict in ("changed", "within noise", "identical")

    @property
    def moved(self) -> bool:
        """Whether both rank cells, and the rankings differ."""
        rankings = {self.before, self.after}
        return self.is_ranking and len(rankings) > 1 and NOT_ASKED not in rankings

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "changed": self.changed, "moved": self.moved}


@dataclass(frozen=True)
class Comparison:
    """The second sweep against the first. ``warnings`` name other differences, possible causes.

    ``is_paired`` tells whether trials were paired by seed; else the seeds are independent.
    """

    metric: str
    is_paired: bool
    cells: tuple[CellChange, ...]
    only_before: int
    only_after: int
    conclusions: tuple[Conclusion, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "conclusions": [one.as_dict() for one in self.conclusions]}


def compare_sweeps(before: Study, after: Study) -> Comparison:
    """Compare two studies, whose cells are joined by their levels.

    A factor that only one of them has is at its baseline level in the other. At most a share alpha
    of comparisons of equal truths calls anything changed.
    """
    metric = before.primary_metric
    one, other = _cells_by_key(before), _cells_by_key(after)
    shared = {one[key]: other[key] for key in one if key in other}
    shifts = estimate_shifts(before, after, shared, metric)
    by_name = {_cell_name(before, c): shift for c, shift in shifts.against_baseline.items()}
    return Comparison(
        metric,
        shifts.is_paired,
        tuple(_describe_cells(before, after, shared, shifts, metric)),
        len(one) - len(shared),
        len(other) - len(shared),
        (
            *_compare_effects(before, after, shifts, metric),
            *_compare_fronts(before, after, by_name),
            *_compare_budgets(before, after, by_name),
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


def _describe_cells(
    before: Study,
    after: Study,
    shared: Mapping[Levels, Levels],
    shifts: SweepShifts,
    metric: str,
) -> Iterator[CellChange]:
    for levels, shift in shifts.cells.items():
        values, others = before.values(levels, metric), after.values(shared[levels], metric)
        seeds = [seed for seed in values if seed in others or not shifts.is_paired]
        mean = math.fsum(values[seed] for seed in seeds) / len(seeds)
        yield CellChange(
            dict(zip(before.factors, levels, strict=True)),
            mean,
            mean + shift.value,
            shift.value,
            shift.low,
            shift.high,
            shift.seeds,
            _verdict(shift, "differs"),
        )


def _verdict(shift: Shift | None, found: str = "changed") -> str:
    if shift is None:
        return "not compared"
    return found if shift.is_found else VERDICTS.get(shift.kind, VERDICTS["within noise"]).words


def _compare_effects(
    before: Study, after: Study, shifts: SweepShifts, metric: str
) -> Iterator[Conclusion]:
    first, second = (
        {effect.name: effect for effect in (*study.effects(metric), *study.interactions(metric))}
        for study in (before, after)
    )
    for name in dict.fromkeys([*first, *second]):
        effects = first.get(name), second.get(name)
        verdicts = [NOT_ASKED if effect is None else effect.verdict for effect in effects]
        values = [
            effect.estimate.value if effect and effect.estimate else None for effect in effects
        ]
        yield _conclude(name, verdicts, values, shifts.effects.get(name))


def _conclude(
    about: str,
    said: list[str],
    values: list[float | None],
    shift: Shift | None,
    is_ranking: bool = False,
) -> Conclusion:
    return Conclusion(
        about,
        before=said[0],
        after=said[1],
        difference_before=values[0],
        difference_after=values[1],
        shift=shift.value if shift else None,
        low=shift.low if shift else 0.0,
        high=shift.high if shift else 0.0,
        verdict=_verdict(shift),
        is_ranking=is_ranking,
    )


def _compare_fronts(
    before: Study, after: Study, shifts: Mapping[str, Shift]
) -> Iterator[Conclusion]:
    """Compare the cells that are on the front of stored bytes against quality in either.

    A cell that joins or leaves the front has changed if its difference from the baseline has, or
    that of the cell which beats it.
    """
    studies = before, after
    points = [{_cell_name(study, p.levels): p for p in memory_front(study)} for study in studies]
    words = {True: "on the front", False: "beaten"}
    for name in dict.fromkeys([*points[0], *points[1]]):
        found = [each.get(name) for each in points]
        if any(point is not None and point.is_on_front for point in found):
            said = [NOT_ASKED if p is None else words[p.is_on_front] for p in found]
            involved = {name} | {
                _cell_name(study, winner.levels)
                for study, by_name, point in zip(studies, points, found, strict=True)
                if (winner := _find_winner(list(by_name.values()), point)) is not None
            }
            yield _conclude_ranking(f"front: {name}", said, involved, shifts)


def _find_winner(points: list[CellPoint], beaten: CellPoint | None) -> CellPoint | None:
    """Return the cell on the front that costs most among those that beat a cell."""
    if beaten is None or beaten.is_on_front:
        return None
    cheaper = [point for point in points if point.is_on_front and point.cost <= beaten.cost]
    return max(cheaper, key=lambda point: point.cost, default=None)


def _compare_budgets(
    before: Study, after: Study, shifts: Mapping[str, Shift]
) -> Iterator[Conclusion]:
    """Compare the best cell of every budget that either has."""
    one, other = (
        {b.condition: _cell_name(study, b.point.levels) for b in best_cells_by_budget(study)}
        for study in (before, after)
    )
    for condition in dict.fromkeys([*one, *other]):
        said = [each.get(condition, NOT_ASKED) for each in (one, other)]
        yield _conclude_ranking(f"best {condition}", said, set(said), shifts)


def _conclude_ranking(
    about: str, said: list[str], involved: set[str], shifts: Mapping[str, Shift]
) -> Conclusion:
    found = [shifts[name] for name in sorted(involved) if name in shifts]
    surest = min(found, key=lambda one: (not one.is_found, one.p), default=None)
    return _conclude(about, said, [None, None], surest, is_ranking=True)


def _cell_name(study: Study, levels: Levels) -> str:
    """Return a name of a cell that does not depend on the order of the factors."""
    return (
        "+".join(sorted(f"{f}={level}" for f, level in _cell_key(study, levels))) or BASELINE_LABEL
    )


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
