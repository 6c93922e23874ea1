"""Designs: which combinations of levels a sweep trains.

A design gives cells as what they change of the baseline. `DESIGNS` is the table: a new design is a
function and a line there.

`fractional:N` keeps one cell in N of two-level factors, as a regular fraction 2^(k-p), N = 2^p. p
factors are *generated*: each is set by the product of some of the others. Effects are then
aliased: a contrast measures the sum of several effects, which follow from the notes. Generators are
chosen for the highest resolution, then for the fewest short words (minimum aberration; Box and
Hunter 1961, Fries and Hunter 1980). The fraction is the one that holds the baseline.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

Changes = Mapping[str, str]
"""One cell: the levels that are not the baseline's, by factor."""


@dataclass(frozen=True)
class DesignRequest:
    """What a design selects cells from.

    Attributes:
        factors: the levels of every factor, the baseline's first.
        targets: the reductions of factors with several levels beside the baseline's.
        listed: as written in `cells`.
    """

    factors: Mapping[str, Sequence[str]]
    targets: Mapping[str, str]
    listed: Sequence[Changes] = ()
    fraction: int = 1

    def reductions(self) -> dict[str, str]:
        """Return the reduction of every factor that has one."""
        found = {}
        for factor, levels in self.factors.items():
            if len(levels) > 2 and factor not in self.targets:  # any of them could be meant
                text = f"must name the level of {factor} that is the reduction"
                raise DesignError("target", f"{text}: {' or '.join(levels[1:])}")
            found[factor] = self.targets.get(factor, levels[-1])
        return {factor: one for factor, one in found.items() if one != self.factors[factor][0]}


class DesignError(Exception):
    """A design is impossible: the field at fault, the rule and what to do about it."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field, self.message = field, message


@dataclass(frozen=True)
class Design:
    """One member of the family.

    Attributes:
        cells: the function that gives the cells, the baseline among them; a cell may come
            twice.
        notes: the function that gives remarks for the report, such as which effects are aliased.
        keys: the keys of a sweep that this design reads and others do not.
        arguments: the numbers that may follow its name and a colon; empty if it takes none.
        can_be_filtered: whether it stays valid if cells are excluded or merged.
    """

    title: str
    cells: Callable[[DesignRequest], Iterator[Changes]]
    notes: Callable[[DesignRequest], tuple[str, ...]] = lambda _request: ()
    keys: frozenset[str] = frozenset()
    arguments: tuple[int, ...] = ()
    can_be_filtered: bool = True


def full_factorial(request: DesignRequest) -> Iterator[Changes]:
    """Yield every combination."""
    for levels in product(*request.factors.values()):
        yield dict(zip(request.factors, levels, strict=True))


def one_factor_at_a_time(request: DesignRequest) -> Iterator[Changes]:
    """Yield the baseline, and each other level alone."""
    yield {}
    for factor, levels in request.factors.items():
        yield from ({factor: level} for level in levels[1:])


def baseline_alone(request: DesignRequest) -> Iterator[Changes]:  # noqa: ARG001
    """Yield the baseline, which all others are compared with; for more seeds of it."""
    yield {}


def leave_one_out(request: DesignRequest) -> Iterator[Changes]:
    """Yield the baseline, all reductions together, and all but each one."""
    reductions = request.reductions()
    yield {}
    yield reductions
    for left_out in reductions:
        yield {factor: level for factor, level in reductions.items() if factor != left_out}


def cumulative(request: DesignRequest) -> Iterator[Changes]:
    """Yield the baseline, then one more reduction each time, in the order of the factors."""
    reductions = list(request.reductions().items())
    for count in range(len(reductions) + 1):
        yield dict(reductions[:count])


def pairwise(request: DesignRequest) -> Iterator[Changes]:
    """Yield the baseline, each other level alone, and every two of them together.

    These are the fewest cells that show every interaction of two factors against the baseline.
    """
    yield from one_factor_at_a_time(request)
    for (first, first_levels), (second, second_levels) in combinations(request.factors.items(), 2):
        for one, other in product(first_levels[1:], second_levels[1:]):
            yield {first: one, second: other}


def hand_picked(request: DesignRequest) -> Iterator[Changes]:
    """Yield the baseline, and the cells that `cells` lists."""
    if not request.listed:
        raise DesignError("design", "needs `cells:`; list at least one, as in - {heads: mqa}")
    yield {}
    yield from request.listed


# Fractions

Word = frozenset[int]
"""Factors whose product is constant over the fraction."""

MAX_SEARCHED = 20_000
"""The most fractions among which the best is searched."""

MAX_FREE = 16
"""The most factors that are not generated: a fraction has at most 2^16 cells."""


def fractional_factorial(request: DesignRequest) -> Iterator[Changes]:
    """Yield the cells of the fraction."""
    generators = _choose_generators(request)
    for free in product((0, 1), repeat=len(request.factors) - len(generators)):
        generated = (sum(free[parent] for parent in parents) % 2 for parents in generators.values())
        cell = zip(request.factors.items(), (*free, *generated), strict=True)
        yield {factor: levels[1] for (factor, levels), is_changed in cell if is_changed}


_ROMAN = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X")


def describe_aliasing(request: DesignRequest) -> tuple[str, ...]:
    """Return the resolution (Box and Hunter 1961) with the defining relation, as one note."""
    words, names = _defining_relation(_choose_generators(request)), list(request.factors)
    constant = " = ".join(
        # the sign: the baseline, with every factor at -1, is in the fraction
        ("-" if len(word) % 2 else "+") + "*".join(names[factor] for factor in sorted(word))
        for word in words
    )
    shortest = min(map(len, words))
    resolution = _ROMAN[shortest] if shortest < len(_ROMAN) else shortest
    text = f"resolution {resolution}; defining relation: I = {constant}"
    return (f"{text}, whose products with an effect are its aliases",)


def _choose_generators(request: DesignRequest) -> dict[int, Word]:
    """Return the last factors as products of the first, with minimum aberration."""
    count, generated = len(request.factors), request.fraction.bit_length() - 1
    free = count - generated
    for name, levels in request.factors.items():
        if len(levels) != 2:
            text = f"takes factors of two levels, and {name} has {len(levels)}"
            raise DesignError("design", f"{text}; drop levels, or use pairwise")
    if not 2 <= free <= MAX_FREE:
        text = f"keeps 2^{free} of 2^{count} cells, and a fraction has 2^2 to 2^{MAX_FREE}"
        raise DesignError("design", f"{text}; use another fraction, or full")
    sizes = range(free, 1, -1)
    products = [frozenset(parents) for size in sizes for parents in combinations(range(free), size)]
    if not 0 < comb(len(products), generated) <= MAX_SEARCHED:
        text = f"has no fraction, or too many to choose from, of {count} factors"
        raise DesignError("design", f"{text}; use another fraction, or fewer factors")

    def aberration(generators: dict[int, Word]) -> list[int]:
        """Return the number of words of each length, shortest first: less is better."""
        lengths = [len(word) for word in _defining_relation(generators)]
        return [lengths.count(length) for length in range(1, max(lengths) + 1)]

    chosen = (dict(enumerate(words, free)) for words in combinations(products, generated))
    return min(chosen, key=aberration)


def _defining_relation(generators: dict[int, Word]) -> list[Word]:
    """Return all products of the generating words, shortest first."""
    words: list[Word] = []
    for axis, parents in generators.items():
        word = parents | {axis}
        words += [word, *(word ^ other for other in words)]
    return sorted(words, key=lambda word: (len(word), sorted(word)))


DESIGNS: dict[str, Design] = {
    "full": Design("full factorial", full_factorial),
    "one_factor": Design("one-factor-at-a-time", one_factor_at_a_time),
    "baseline": Design("baseline alone", baseline_alone),
    "leave_one_out": Design("leave-one-out", leave_one_out, keys=frozenset({"target"})),
    "cumulative": Design("cumulative", cumulative, keys=frozenset({"target"})),
    "pairwise": Design("pairwise", pairwise),
    "cells": Design("hand-picked", hand_picked, keys=frozenset({"cells"})),
    "fractional": Design(
        "fractional factorial",
        fractional_factorial,
        describe_aliasing,
        arguments=(2, 4, 8, 16, 32, 64),
        can_be_filtered=False,
    ),
}


def list_design_names() -> list[str]:
    """Return the values of `design`, with the numbers that may follow a colon."""
    return [
        f"{name}:{argument}" if argument else name
        for name, design in DESIGNS.items()
        for argument in design.arguments or ("",)
    ]
