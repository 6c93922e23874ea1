"""What a sweep's keys must fulfil together: names that exist, keys that are used."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.spec.sweep import Sweep

FieldProblems = Iterator[tuple[str, str]]


def name_problems(sweep: "Sweep") -> FieldProblems:
    """Every factor and level that is named must exist."""
    yield from level_problems(sweep, "baseline", sweep.baseline)
    yield from level_problems(sweep, "target", sweep.target)
    for number, cell in enumerate(sweep.cells_asked):
        yield from level_problems(sweep, f"cells.{number}", cell)
    for key, rules in (("exclude", sweep.exclude), ("include", sweep.include)):
        for number, rule in enumerate(rules):
            yield from _rule_problems(sweep, f"{key}.{number}", rule)
    above: list[str] = []
    for factor in sweep.factors:
        for other in sweep.when.get(factor, {}):
            if other in sweep.factors and other not in above:
                text = f"does not stand above {factor} in factors; move it there"
                yield f"when.{factor}.{other}", text
        above.append(factor)
    for factor, rule in sweep.when.items():
        if factor not in sweep.factors:
            yield f"when.{factor}", f"is not a factor; {_suggest(factor, sweep.factors)}"
        yield from _rule_problems(sweep, f"when.{factor}", rule)


def search_problems(sweep: "Sweep") -> FieldProblems:
    """A sweep has factors or a search; a search chooses its cells itself."""
    if sweep.search is None:
        if not sweep.factors:
            yield "factors", "is missing or empty; give at least one factor, or a search"
        return
    made = {
        "factors", "baseline", "design", "designs", "zip", "when", "target", "cells_asked",
        "generators", "exclude", "include",
    }  # fmt: skip
    for name in sorted(made & sweep.model_fields_set):
        key = "cells" if name == "cells_asked" else name
        yield key, "does not go with search, which chooses its own cells; leave one out"
    if len(sweep.seeds) > 1:
        text = "has several seeds, and a search trains each suggestion once"
        yield "seeds", f"{text}; give one, and repeat the best in a sweep of its own"


def use_problems(sweep: "Sweep") -> FieldProblems:
    """Every key that is written must change something."""
    written = sweep.model_fields_set
    if sweep.designs and written & {"design", "seeds"}:
        yield "designs", "already names designs and their seeds; leave out design and seeds"
    for key, seeds in (("seeds", sweep.seeds), *((f"designs.{d}", s) for d, s in _designs(sweep))):
        if len(set(seeds)) != len(seeds):
            yield key, "names a seed twice; name each once"
    kinds = {name.partition(":")[0] for name in sweep.design_seeds}
    for key, field, users in (
        ("target", "target", {"leave_one_out", "cumulative"}),
        ("cells", "cells_asked", {"cells"}),
        ("generators", "generators", {"fractional"}),
    ):
        if getattr(sweep, field) and not kinds & users:
            yield key, f"is used by design: {' or '.join(sorted(users))} alone; leave it out"


def zip_problems(sweep: "Sweep") -> FieldProblems:
    """Zipped factors have as many levels, and their baseline is one of the zipped rows."""
    seen: set[str] = set()
    for number, group in enumerate(sweep.zip):
        unknown = next((factor for factor in group if factor not in sweep.factors), None)
        if unknown is not None:
            text = f"names {unknown}, which is not a factor; {_suggest(unknown, sweep.factors)}"
            yield f"zip.{number}", text
            return
        if seen & set(group) or len(set(group)) != len(group):
            yield f"zip.{number}", "names a factor that is zipped already; zip each once"
            return
        seen |= set(group)
        order = [factor for factor in sweep.factors if factor in group]
        if order[0] != group[0]:
            yield f"zip.{number}", f"must begin with {order[0]}, which stands first in factors"
            return
        sizes = {factor: len(sweep.factors[factor]) for factor in group}
        if len(set(sizes.values())) > 1:
            text = ", ".join(f"{factor} {size}" for factor, size in sizes.items())
            yield f"zip.{number}", f"joins factors of unequal length ({text}); give them as many"
            return
        places = {list(sweep.factors[f]).index(sweep.baseline[f]) for f in group}
        if len(places) > 1:
            text = "has no row with the baseline levels of all; choose the baseline from one row"
            yield f"zip.{number}", text


def _designs(sweep: "Sweep") -> list[tuple[str, tuple[int, ...]]]:
    return list(sweep.designs.items())


def _rule_problems(
    sweep: "Sweep", where: str, rule: Mapping[str, tuple[str, ...]]
) -> FieldProblems:
    if not rule:
        yield where, "names no level, so it would fit every cell; name at least one"
    for factor, levels in rule.items():
        if not levels:
            yield f"{where}.{factor}", "names no level; name at least one, or leave it out"
        for level in levels:
            yield from level_problems(sweep, where, {factor: level})


def level_problems(sweep: "Sweep", where: str, levels: Mapping[str, str]) -> FieldProblems:
    for factor, level in levels.items():
        if factor not in sweep.factors:
            yield f"{where}.{factor}", f"is not a factor; {_suggest(factor, sweep.factors)}"
        elif level not in sweep.factors[factor]:
            known = _suggest(level, sweep.factors[factor])
            yield f"{where}.{factor}", f"is not a level of {factor}; {known}"


def _suggest(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
