"""Two sweeps, or two records of one sweep, side by side: joined by cell, conclusions compared."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.report.effects import Effect
from kvlab.report.study import Study

NOT_ASKED = "not asked"
NO_CONCLUSION = frozenset({NOT_ASKED, "no matched pair", "one seed: not tested"})
"""Verdicts that say nothing about a level."""


@dataclass(frozen=True)
class CellChange:
    """A cell that both have: its means and their difference, over the seeds that both have."""

    levels: dict[str, str]
    before: float
    after: float
    difference: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Conclusion:
    """What each says about one level."""

    level: str
    before: str
    after: str
    difference_before: float | None
    difference_after: float | None

    @property
    def changed(self) -> bool:
        """Whether both conclude something, and not the same."""
        return self.concluded and self.before != self.after

    @property
    def concluded(self) -> bool:
        return NO_CONCLUSION.isdisjoint((self.before, self.after))


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
        conclusions = [{**asdict(one), "changed": one.changed} for one in self.conclusions]
        return {**asdict(self), "conclusions": conclusions}


def compare(before: Study, after: Study) -> Comparison:
    """Joins the cells of two studies by the levels of the factors that either has.

    A factor that only one of them has counts as being at its baseline level in the other.
    """
    metric = before.primary
    one, other = _by_levels(before), _by_levels(after)
    shared = [key for key in one if key in other]
    cells = [_change(before, one[key], after, other[key], metric) for key in shared]
    return Comparison(
        metric,
        tuple(change for change in cells if change is not None),
        len(one) - len(shared),
        len(other) - len(shared),
        tuple(_conclusions(before, after, metric)),
        tuple(_warnings(before, after)),
    )


Key = frozenset[tuple[str, str]]


def _by_levels(study: Study) -> dict[Key, tuple[str, ...]]:
    """Cells by the levels that differ from the baseline, whatever the factors' order."""
    return {
        frozenset(
            (factor, level)
            for factor, level, base in zip(study.factors, cell, study.baseline, strict=True)
            if level != base
        ): cell
        for cell in study.cells
    }


def _change(
    before: Study, one: tuple[str, ...], after: Study, other: tuple[str, ...], metric: str
) -> CellChange | None:
    from kvlab.report.statistics.paired import estimate

    mine, theirs = before.values(one, metric), after.values(other, metric)
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return None
    found = estimate([theirs[seed] - mine[seed] for seed in seeds], max(map(abs, mine.values())))
    return CellChange(
        dict(zip(before.factors, one, strict=True)),
        sum(mine[seed] for seed in seeds) / len(seeds),
        sum(theirs[seed] for seed in seeds) / len(seeds),
        found.value,
        found.low,
        found.high,
        len(seeds),
    )


def _conclusions(before: Study, after: Study, metric: str) -> Iterator[Conclusion]:
    one = {effect.name: effect for effect in before.effects(metric)}
    other = {effect.name: effect for effect in after.effects(metric)}
    for name in dict.fromkeys([*one, *other]):
        yield Conclusion(
            name,
            _verdict(one.get(name)),
            _verdict(other.get(name)),
            _value(one.get(name)),
            _value(other.get(name)),
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
        one, other = _facts(before, path), _facts(after, path)
        if one != other:
            yield f"{what} differ: {_listed(one)} against {_listed(other)}"
    yield from _unlike_levels(before, after)
    if before.seeds != after.seeds:
        mine, theirs = (", ".join(map(str, study.seeds)) for study in (before, after))
        yield f"seeds differ: {mine} against {theirs}"
    bases = before.sweep.get("experiment_yaml"), after.sweep.get("experiment_yaml")
    if bases[0] != bases[1]:
        yield "base experiments differ"
    if before.primary != after.primary:
        yield f"quality is measured by {before.primary} against {after.primary}"


def _unlike_levels(before: Study, after: Study) -> Iterator[str]:
    """Levels of one name that set unlike things, and so are not the same level."""
    one, other = before.sweep.get("patches", {}), after.sweep.get("patches", {})
    for factor in sorted(one.keys() & other.keys()):
        for level in sorted(one[factor].keys() & other[factor].keys()):
            mine, theirs = one[factor][level], other[factor][level]
            if mine != theirs:
                yield f"{factor}={level} sets {_patch(mine)} against {_patch(theirs)}"


def _patch(patch: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in patch.items()) or "nothing"


def _facts(study: Study, path: tuple[str, ...]) -> set[str]:
    found = set()
    for row in study.done:
        value: Any = row.facts["provenance"]
        for key in path:
            value = (value or {}).get(key)
        found.add(_text(value))
    return found


def _text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {version}" for name, version in sorted(value.items()))
    return str(value)


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(values)) or "nothing"
