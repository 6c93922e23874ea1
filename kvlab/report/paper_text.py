"""LaTeX of a paper: numbers, lists, citations with their BibTeX, and what the sentences state."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from kvlab.analysis.study import Study

Experiment = Mapping[str, Mapping[str, Any]]


def list_citations(text: str) -> list[str]:
    """Return the keys that LaTeX cites, sorted."""
    cited = re.findall(r"\\cite\{([^}]*)\}", text)
    return sorted({key for keys in cited for key in keys.split(",")})


def write_bibliography(keys: Iterable[str]) -> str:
    """Return the BibTeX entries of ``keys``."""
    entries = _read_entries()
    return "\n".join(entries[key] for key in keys)


@cache
def _read_entries() -> dict[str, str]:
    """Return the entries of the package's bibliography by key."""
    text = (files("kvlab.report") / "references.bib").read_text("utf-8")
    entries = re.findall(r"^@\w+\{([^,]+),.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    bodies = re.findall(r"^@\w+\{[^,]+,.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    return dict(zip(entries, bodies, strict=True))


def cite(*keys: str) -> str:
    return f"~\\cite{{{','.join(keys)}}}"


class Facts:
    """The experiments of the trials that are done.

    Args:
        study: The study.

    Attributes:
        experiments: One experiment a trial.
    """

    def __init__(self, study: Study):
        self.experiments: list[Experiment] = [row.record["experiment"] for row in study.done_rows]

    def values(self, section: str, key: str) -> list[Any]:
        """Return the distinct values of a key that is not null, in the order of the cells."""
        found = [one.get(section, {}).get(key) for one in self.experiments]
        kept: list[Any] = []
        for value in found:
            if value is not None and value not in kept:
                kept.append(value)
        return kept

    def any(self, test: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Return whether the model of any experiment passes a test."""
        return any(test(one.get("model", {})) for one in self.experiments)

    def span(self, section: str, key: str) -> str:
        """Return the values of a number as LaTeX: one, or the least and the greatest."""
        return span(self.values(section, key))


def span(values: Sequence[Any]) -> str:
    """Return numbers as LaTeX: one, or the least and the greatest; empty without any."""
    numbers = sorted({value for value in values if isinstance(value, int | float)})
    if not numbers:
        return ""
    low, high = format_latex_number(numbers[0]), format_latex_number(numbers[-1])
    return low if len(numbers) == 1 else f"{low} to {high}"


def format_latex_number(value: float) -> str:
    """Format a count with separated thousands, a small number with a power of ten."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "{,}").replace("-", "$-$")
    mantissa, _, exponent = f"{value:.4e}".partition("e")
    if -3 <= int(exponent) < 4:
        return f"{value:.5g}".replace("-", "$-$")
    mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "$-$")
    return f"${mantissa}\\times 10^{{{int(exponent)}}}$".replace("$$", "")


def count_noun(number: int, noun: str) -> str:
    """Return a count with its noun, as LaTeX."""
    return f"{format_latex_number(number)} {noun}{'s' if number != 1 else ''}"


def join(parts: Iterable[str]) -> str:
    """Join words as a list: ``a``, ``a and b``, ``a, b and c``; empty without any."""
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last
