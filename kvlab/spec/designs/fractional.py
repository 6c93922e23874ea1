"""`fractional:N`: one cell in N of two-level factors, as a regular fraction 2^(k-p), N = 2^p.

p factors are *generated*: each is set by the product of some of the others. So effects are
aliased: a contrast measures the sum of several effects, and which ones is stated. Generators
that are not written are chosen for the highest resolution, then for the fewest short words
(minimum aberration; Box and Hunter 1961, Fries and Hunter 1980). The fraction is the one that
holds the baseline.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import comb

from kvlab.spec.design import Design, DesignError, DesignRequest, Positions

Word = frozenset[int]
"""Axes whose product is constant over the fraction; its sign is `_sign`."""

MAX_SEARCHED = 20_000
MAX_FREE = 16


def fractional_factorial(asked: DesignRequest) -> Iterator[Positions]:
    generators = _generators(asked)
    free = [place for place in range(len(asked.axes)) if place not in generators]
    for bits in product((0, 1), repeat=len(free)):
        cell = dict(zip(free, bits, strict=True))
        for place, parents in generators.items():
            cell[place] = sum(cell[parent] for parent in parents) % 2
        yield asked.changed(cell)


def describe_aliasing(asked: DesignRequest) -> tuple[str, ...]:
    """The resolution, and for every effect of one or two factors what it is aliased with."""
    words = _defining_relation(
        [frozenset({place, *by}) for place, by in _generators(asked).items()]
    )
    names = [axis.name for axis in asked.axes]
    resolution = min(map(len, words))
    lines = [
        f"resolution {resolution}; constant: {', '.join(_format_signed(w, names) for w in words)}"
    ]
    for size in (1, 2):
        for effect in map(frozenset, combinations(range(len(names)), size)):
            mixed = [(effect ^ word, _sign(word)) for word in words if len(effect ^ word) <= 2]
            others = [
                f"{sign}{_format_word(alias, names)}"
                for alias, sign in sorted(mixed, key=lambda m: (len(m[0]), sorted(m[0])))
                if size == 1 or (len(alias) == 2 and sorted(effect) < sorted(alias))
            ]
            if others:
                lines.append(f"{_format_word(effect, names)} is aliased with {', '.join(others)}")
    return tuple(lines)


def _generators(asked: DesignRequest) -> dict[int, Word]:
    """Generated axis -> the free axes whose product sets it."""
    count, generated = len(asked.axes), asked.fraction.bit_length() - 1
    for axis in asked.axes:
        if len(axis.points) != 2:
            text = f"takes factors of two levels, and {axis.name} has {len(axis.points)}"
            raise DesignError("design", f"{text}; drop levels, or use pairwise")
    if count - generated < 2:
        text = f"keeps fewer than 4 of {2**count} cells; use a larger fraction, or full"
        raise DesignError("design", text)
    if count - generated > MAX_FREE:
        text = f"keeps 2^{count - generated} cells, and a sweep holds 2^{MAX_FREE}"
        raise DesignError("design", f"{text}; use a smaller fraction")
    if asked.generators:
        return _check_generators(asked, generated)
    return _choose_generators(count, generated)


def _check_generators(asked: DesignRequest, generated: int) -> dict[int, Word]:
    places = {axis.name: place for place, axis in enumerate(asked.axes)}
    written = asked.generators or {}
    if len(written) != generated:
        text = f"has {len(written)} of the {generated} generators of 1/{asked.fraction}"
        raise DesignError("generators", f"{text}; write {generated}, or none to have them chosen")
    found = {}
    for name, by in written.items():
        for factor in (name, *by):
            if factor not in places:
                text = f"names {factor}, which is no axis of this design"
                raise DesignError("generators", f"{text}; use {', '.join(places)}")
        if set(by) & written.keys() or len(set(by)) < 2:
            text = f"sets {name} by {', '.join(by)}; use two or more factors that are not generated"
            raise DesignError("generators", text)
        found[places[name]] = frozenset(places[factor] for factor in by)
    words = [frozenset({place, *by}) for place, by in found.items()]
    if min(map(len, _defining_relation(words))) < 3:
        text = "make two factors move together, so that neither can be told; use other products"
        raise DesignError("generators", text)
    return found


def _choose_generators(count: int, generated: int) -> dict[int, Word]:
    """The last axes as products of the first ones."""
    free = range(count - generated)
    sizes = range(len(free), 1, -1)
    products = [frozenset(by) for size in sizes for by in combinations(free, size)]
    if len(products) < generated:
        text = f"cannot set {generated} factors by products of {len(free)}; use a larger fraction"
        raise DesignError("design", text)
    last = range(count - generated, count)
    if comb(len(products), generated) > MAX_SEARCHED:
        text = f"has too many fractions of {count} factors to choose from; write generators"
        raise DesignError("design", text)
    choices = (dict(zip(last, bys, strict=True)) for bys in combinations(products, generated))
    return min(choices, key=_aberration)


def _aberration(generators: dict[int, Word]) -> list[int]:
    """How many words there are of each length, shortest first: less is better."""
    words = _defining_relation([frozenset({place, *by}) for place, by in generators.items()])
    lengths = [len(word) for word in words]
    return [lengths.count(length) for length in range(1, max(lengths) + 1)]


def _defining_relation(generators: Sequence[Word]) -> list[Word]:
    """The defining relation: all products of the generating words."""
    words: list[Word] = []
    for word in generators:
        words += [word, *(word ^ other for other in words)]
    return sorted(words, key=lambda word: (len(word), sorted(word)))


def _sign(word: Word) -> str:
    """With the baseline at -1: the baseline is in the fraction, so its product is the word's."""
    return "-" if len(word) % 2 else "+"


def _format_signed(word: Word, names: Sequence[str]) -> str:
    return f"{_sign(word)}{_format_word(word, names)}"


def _format_word(places: Word, names: Sequence[str]) -> str:
    return "*".join(names[place] for place in sorted(places))


FRACTIONAL = Design("fractional factorial", fractional_factorial, describe_aliasing, filtered=False)
