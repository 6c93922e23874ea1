"""Format numbers: a true minus sign, fixed digits, bytes in KiB and MiB."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvlab.spec.search_config import format_setting
from kvlab.store.metrics import BEGINNINGS, METRICS, SHORT_TITLES, Metric

MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"

_SHARED_DIGITS = 12
"""Digits of a float that do not depend on the processor. Sums and products in NumPy and SciPy take
another order on other processors, which changes the last few."""

_DECIMALS = {"nats/token": 4, "bits/byte": 4}
_ROUNDING = 1e-6
"""A difference of losses below it is rounding; a larger one is never shown as zero."""


def round_to_shared_digits(value: Any) -> Any:
    """Return a float rounded to the digits that processors agree on; other values as they are."""
    return float(f"{value:.{_SHARED_DIGITS}g}") if isinstance(value, float) else value


def _find_metric(name: str) -> Metric:
    return METRICS[name] if name in METRICS else Metric("", "")


def _unit(metric: str) -> str:
    return _find_metric(metric).unit


def is_share(metric: str) -> bool:
    """Whether a metric is a share of items: shown in percent, its differences in points."""
    is_counted = metric.startswith(BEGINNINGS["shares"]) or METRICS.is_offered(metric)
    return is_counted and not _unit(metric)


def format_fixed(value: float, digits: int) -> str:
    """Format with a fixed number of decimals; a value that rounds to zero has no sign."""
    text = f"{value:,.{digits}f}"
    if text.startswith("-"):
        text = text[1:] if not text.strip("-0.,") else MINUS + text[1:]
    return text


def format_signed(value: float, digits: int) -> str:
    """Format as `format_fixed`, with a sign unless the value rounds to zero."""
    text = format_fixed(value, digits)
    return text if text.startswith(MINUS) or not text.strip("0.,") else f"+{text}"


def format_significant(value: float, digits: int = 3) -> str:
    """Format with a number of significant digits, without an exponent below 10^15."""
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return format_fixed(round(value, decimals), max(0, decimals))


def format_spread(value: float, digits: int = 3) -> str:
    """Format with significant digits, and with an exponent below 0.001."""
    if value == 0 or abs(value) >= 1e-3:
        return format_significant(value, digits)
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS)


def format_metric(metric: str, value: float) -> str:
    """Format a metric's value, without its unit."""
    if is_share(metric):
        return format_fixed(100 * value, 2)
    if metric.startswith(BEGINNINGS["wide"]):
        return format_spread(value)
    unit = _unit(metric)
    if unit in _DECIMALS:
        return format_fixed(value, _DECIMALS[unit])
    is_integer = unit in ("bytes", "tokens", "items")
    return f"{value:,.0f}" if is_integer else format_significant(value)


def format_difference(metric: str, value: float) -> str:
    """Format a difference of two values of a metric, with its sign, without its unit."""
    if is_share(metric):
        return format_signed(100 * value, 2)
    if metric.startswith(BEGINNINGS["wide"]):
        return f"+{format_spread(value)}" if value > 0 else format_spread(value)
    unit = _unit(metric)
    if unit in _DECIMALS and not _ROUNDING <= abs(value) < 0.5 * 10.0 ** -_DECIMALS[unit]:
        return format_signed(value, _DECIMALS[unit])
    text = format_significant(value, 2 if unit in _DECIMALS else 3)
    return text if text.startswith(MINUS) or value == 0 else f"+{text}"


def difference_with_unit(metric: str, value: float) -> str:
    """Format a difference with its sign and its unit, such as ``+0.0123 nats/token``."""
    return f"{format_difference(metric, value)} {difference_unit(metric)}".strip()


def format_cost(metric: str, value: float) -> str:
    """Format a difference as a cost: where higher is better, by how much the metric falls."""
    if _find_metric(metric).better != "higher":
        return format_difference(metric, value)
    return format_difference(metric, -value).lstrip("+")


def format_interval(metric: str, low: float, high: float) -> str:
    """Format the ends of an interval of differences, such as ``+0.01 to +0.03``."""
    return f"{format_difference(metric, low)} to {format_difference(metric, high)}"


def format_magnitude(metric: str, value: float) -> str:
    """Format the magnitude of a difference."""
    return format_difference(metric, value).lstrip(f"+{MINUS}")


def in_display_unit(metric: str, value: float) -> float:
    """Convert a value, or a difference of two, to the unit of `display_unit`."""
    return 100 * value if is_share(metric) else value


def display_unit(metric: str) -> str:
    """Return the unit of `format_metric`."""
    return "%" if is_share(metric) else _unit(metric)


def difference_unit(metric: str) -> str:
    """Return the unit of `format_difference`: percentages differ by points."""
    return "points" if is_share(metric) else _unit(metric)


def format_p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else format_fixed(value, 3)


def short_title(metric: str) -> str:
    """Return a metric's title for heads of columns and axes."""
    return SHORT_TITLES.get(metric, _find_metric(metric).title)


def format_confidence(alpha: float) -> str:
    """Return the confidence that an error of ``alpha`` leaves, such as ``95%``."""
    return f"{100 * (1 - alpha):g}%"


def format_ratio(ratio: float) -> str:
    return f"{format_significant(ratio)}{TIMES}"


def format_ends(values: Iterable[float], show: Callable[[Any], str]) -> str:
    """Return the least and the greatest number: one if both look alike, empty without any."""
    found = list(values)
    return " to ".join(dict.fromkeys(map(show, (min(found), max(found))))) if found else ""


def capitalize(text: str) -> str:
    """Return a text with a capital first letter; the others stay."""
    return text[:1].upper() + text[1:]


def format_percent(share: float, digits: int = 1) -> str:
    return f"{format_fixed(100 * share, digits)}%"


def format_settings(patch: Mapping[str, Any]) -> str:
    """Return what a level sets, as ``model.kv: {latent: 8}``."""
    shown = (format_setting(v) if isinstance(v, Mapping) else str(v) for v in patch.values())
    return ", ".join(map(": ".join, zip(patch, shown, strict=True)))


def describe_member(value: Any) -> str:
    """Return a value of a record that may be a member of a user's file, with its settings."""
    if not isinstance(value, Mapping):
        return str(value)
    [(name, settings)] = value.items()
    return f"{name} ({', '.join(f'{k} {format_setting(v)}' for k, v in settings.items())})"
