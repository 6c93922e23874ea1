"""Compare two sweeps, or two records of one sweep: their cells and their conclusions."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.analysis.study import BASELINE_LABEL, Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import VERDICTS
from kvlab.extensions.comparison.shifts import Shift, SweepShifts, estimate_shifts
from kvlab.report.pareto_front import best_cells_by_budget, memory_front

NOT_ASKED = "not asked"

Studies = tuple[Study, Study]
"""The first sweep, and the second."""


@dataclass(frozen=True)
class CellChange:
    """A cell that both sweeps have.

    Attributes:
        before: Mean in the first sweep; of paired trials, over the seeds that both have.
        after: Mean in the second sweep, over the same seeds.
        low: Lower end of the 95% interval of the difference, simultaneous for all that is compared.
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
        difference_before: The difference behind it, if there is one.
        difference_after: The same of the second sweep.
        shift: The second difference minus the first; of a ranking, that of the cell which moved
            most surely. None if it cannot be estimated.
        low: Lower end of the simultaneous interval of the shift.
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
    one, other = ({_cell_name(study, c): c for c in study.cells} for study in (before, after))
    shared = {levels: other[name] for name, levels in one.items() if name in other}
    shifts = estimate_shifts(before, after, shared, metric)
    cells = []
    for levels, shift in shifts.cells.items():
        values, others = before.values(levels, metric), after.values(shared[levels], metric)
        seeds = [seed for seed in values if seed in others or not shifts.is_paired]
        mean = math.fsum(values[seed] for seed in seeds) / len(seeds)
        named = dict(zip(before.factors, levels, strict=True))
        found = (shift.value, shift.low, shift.high, shift.seeds, _verdict(shift, "differs"))
        cells.append(CellChange(named, mean, mean + shift.value, *found))
    by_name = {_cell_name(before, c): shift for c, shift in shifts.against_baseline.items()}
    conclusions = (
        *_compare_effects((before, after), shifts, metric),
        *_compare_fronts((before, after), by_name),
        *_compare_budgets((before, after), by_name),
    )
    return Comparison(
        metric,
        shifts.is_paired,
        tuple(cells),
        len(one) - len(shared),
        len(other) - len(shared),
        conclusions,
        tuple(_warnings((before, after))),
    )


def _cell_name(study: Study, levels: Levels) -> str:
    """Return a name of a cell that does not depend on the order of the factors."""
    named = zip(study.factors, levels, study.baseline, strict=True)
    changed = sorted(f"{factor}={level}" for factor, level, base in named if level != base)
    return "+".join(changed) or BASELINE_LABEL


def _verdict(shift: Shift | None, found: str = "changed") -> str:
    if shift is None:
        return "not compared"
    return found if shift.is_found else VERDICTS.get(shift.kind, VERDICTS["within noise"]).words


def _compare_effects(studies: Studies, shifts: SweepShifts, metric: str) -> Iterator[Conclusion]:
    by_name = [
        {effect.name: effect for effect in (*study.effects(metric), *study.interactions(metric))}
        for study in studies
    ]
    for name in dict.fromkeys([*by_name[0], *by_name[1]]):
        effects = [found.get(name) for found in by_name]
        said = [NOT_ASKED if one is None else one.verdict for one in effects]
        values = [one.estimate.value if one and one.estimate else None for one in effects]
        yield _conclude(name, said, values, shifts.effects.get(name), is_ranking=False)


def _compare_fronts(studies: Studies, shifts: Mapping[str, Shift]) -> Iterator[Conclusion]:
    """Compare the cells that are on the front of stored bytes against quality in either.

    A cell that joins or leaves the front has changed if its difference from the baseline has, or
    that of the cell which beats it: the one on the front that costs most of those that cost less.
    """
    fronts = [{_cell_name(s, p.levels): p for p in memory_front(s)} for s in studies]
    for name in dict.fromkeys([*fronts[0], *fronts[1]]):
        found = [points.get(name) for points in fronts]
        if not any(point is not None and point.is_on_front for point in found):
            continue
        said, involved = [], {name}
        for points, point in zip(fronts, found, strict=True):
            if point is None:
                said.append(NOT_ASKED)
            elif point.is_on_front:
                said.append("on the front")
            else:
                said.append("beaten")
                front = {n: p.cost for n, p in points.items() if p.is_on_front}
                cheaper = (other for other, cost in front.items() if cost <= point.cost)
                involved.add(max(cheaper, key=front.__getitem__, default=name))
        yield _conclude_ranking(f"front: {name}", said, involved, shifts)


def _compare_budgets(studies: Studies, shifts: Mapping[str, Shift]) -> Iterator[Conclusion]:
    """Compare the best cell of every budget that either has."""
    best = [
        {one.condition: _cell_name(study, one.point.levels) for one in best_cells_by_budget(study)}
        for study in studies
    ]
    for condition in dict.fromkeys([*best[0], *best[1]]):
        said = [each.get(condition, NOT_ASKED) for each in best]
        yield _conclude_ranking(f"best {condition}", said, set(said), shifts)


def _conclude_ranking(
    about: str, said: list[str], involved: set[str], shifts: Mapping[str, Shift]
) -> Conclusion:
    found = [shifts[name] for name in sorted(involved) if name in shifts]
    surest = min(found, key=lambda one: (not one.is_found, one.p), default=None)
    return _conclude(about, said, [None, None], surest, is_ranking=True)


def _conclude(
    about: str, said: list[str], values: list[float | None], shift: Shift | None, is_ranking: bool
) -> Conclusion:
    value, low, high = (shift.value, shift.low, shift.high) if shift else (None, 0.0, 0.0)
    both = (said[0], said[1], values[0], values[1])
    return Conclusion(about, *both, value, low, high, _verdict(shift), is_ranking)


def _warnings(studies: Studies) -> Iterator[str]:
    before, after = studies
    for name, *path in (
        ("code (commit)", "commit"),
        ("digests of the training code", "code", "training"),
        ("digests of the measuring code", "code", "measurement"),
        ("uncommitted changes", "dirty"),
        ("kvlab version", "kvlab"),
        ("package versions", "versions"),
        ("Python", "python"),
        ("device", "device"),
        ("data", "data", "digest"),
    ):
        one, other = (_provenance_values(study, path) for study in studies)
        is_unknown = path[0] == "code" and "None" in (one, other)  # of an earlier version
        if one != other and not is_unknown:
            yield f"{name} differ: {one or 'nothing'} against {other or 'nothing'}"
    patches, others = (study.sweep.get("patches", {}) for study in studies)
    for factor in sorted(patches.keys() & others.keys()):
        for level in sorted(patches[factor].keys() & others[factor].keys()):
            settings = [each[factor][level] for each in (patches, others)]
            if settings[0] != settings[1]:
                first, second = (
                    ", ".join(f"{key}: {value}" for key, value in one.items()) for one in settings
                )
                yield f"{factor}={level} sets {first or 'nothing'} against {second or 'nothing'}"
    if before.seeds != after.seeds:
        first, second = (", ".join(map(str, study.seeds)) for study in studies)
        yield f"seeds differ: {first} against {second}"
    if before.sweep.get("experiment_yaml") != after.sweep.get("experiment_yaml"):
        yield "base experiments differ"
    if before.primary_metric != after.primary_metric:
        yield f"quality is measured by {before.primary_metric} against {after.primary_metric}"


def _provenance_values(study: Study, path: list[str]) -> str:
    """Return the values of a recorded fact in all trials, sorted."""
    values = set()
    for row in study.done_rows:
        value: Any = row.record["provenance"]
        for key in path:
            value = (value or {}).get(key)
        if isinstance(value, dict):
            value = " ".join(f"{name} {version}" for name, version in sorted(value.items()))
        if isinstance(value, list):
            value = " + ".join(value)
        values.add(str(value))
    return ", ".join(sorted(values))
