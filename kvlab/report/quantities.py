"""Columns and cells of measured quantities: what people read, and the numbers for the CSV."""

from collections.abc import Sequence

from kvlab.report.numbers import PLUS_MINUS, difference, difference_unit, in_unit, shown, unit_of
from kvlab.report.section import EMPTY, Cell, Column


def mean_column(title: str, unit: str = "", hint: str = "", csv_title: str = "") -> Column:
    """A column of `mean_cell`. ``unit`` is only for the CSV, if the head does not say it.

    Args:
        csv_title: of the CSV's columns, where the head alone does not say what it is.
    """
    name, known = _parts(csv_title or title)
    unit = known or unit
    return Column(title, True, hint, (_with(name, unit), _with(f"{name} sd", unit)))


def mean_cell(metric: str, values: Sequence[float]) -> Cell:
    """The mean over seeds, and from two on its standard deviation."""
    if not values:
        return EMPTY
    mean, spread = mean_and_spread(values)
    text = shown(metric, mean)
    if spread is not None:
        text += f" {PLUS_MINUS} {shown(metric, spread)}"
    value, sd = in_unit(metric, mean), None if spread is None else in_unit(metric, spread)
    return Cell(text, value, csv=(value, sd))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1); None for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def range_column(
    title: str, unit: str = "", hint: str = "", ends: tuple[str, str] = ("low", "high")
) -> Column:
    """A column of pairs of numbers, such as an interval; it sorts by the first."""
    name, known = _parts(title)
    names = tuple(_with(f"{name} {end}", known or unit) for end in ends)
    return Column(title, True, hint, names)


def range_cell(metric: str, low: float, high: float) -> Cell:
    """Two differences of a metric's values: the ends of an interval."""
    ends = in_unit(metric, low), in_unit(metric, high)
    return Cell(f"{difference(metric, low)} to {difference(metric, high)}", ends[0], csv=ends)


def interval_column(metric: str, hint: str = "") -> Column:
    """The 95% interval of a difference in a metric."""
    return range_column("95% CI", difference_unit(metric), hint)


def difference_cell(metric: str, value: float) -> Cell:
    return Cell(difference(metric, value), in_unit(metric, value))


def value_cell(metric: str, value: float) -> Cell:
    return Cell(shown(metric, value), in_unit(metric, value))


def headed(metric: str, title: str) -> str:
    """A head with its metric's unit."""
    return _with(title, unit_of(metric))


def _parts(title: str) -> tuple[str, str]:
    """``loss (nats/token)`` as its name and unit."""
    name, bracket, rest = title.partition(" (")
    return (name, rest.removesuffix(")")) if bracket and rest.endswith(")") else (title, "")


def _with(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name
